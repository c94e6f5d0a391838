"""An emulated GPU for tests: libraries in place of the driver, cuBLASLt and NCCL, and a compiler in place of nvcc.

Everything of ingot and the real cuda-python run unchanged above them. What is compiled is kept in `build/emulated`.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.plugins.cuda.gpu import Device, find_gpus

SOURCES = Path(__file__).with_name("emulated")
KEPT = Path(__file__).resolve().parents[3] / "build" / "emulated"

_LIBRARIES = {
    "libcuda.so.1": "emulated_driver.cpp",
    "libcublasLt.so.13": "emulated_products.cpp",
    "libnccl.so.2": "emulated_nccl.cpp",
}
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emulation:
    """folders to put in front of the loader's and the shell's path; the driver, for what only tests call. checked: in
    the place of programs, a compiler whose kernels check every access to memory."""

    libraries: Path
    programs: Path
    checked: Path

    def driver(self) -> ctypes.CDLL:
        """Loads the libraries into this process, under the names that others look for."""
        for name in _LIBRARIES:
            ctypes.CDLL(str(self.libraries / name), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def one_context() -> Iterator[None]:
    """While it is open, the driver keeps the context of each GPU, which it would destroy with the last session and make
    anew for the next: on a real GPU that takes longer than most tests."""
    with contextlib.ExitStack() as devices:
        for gpu in find_gpus().gpus:
            devices.enter_context(contextlib.closing(Device(gpu)))
        yield


def build_emulation() -> Emulation:
    """Compile what is not there yet; skips where that cannot be."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("this machine lacks a C++ compiler for x86-64, which the emulated GPU needs")
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("this machine lacks cuda-python")
    texts = [path.read_bytes() for path in _sources()]
    folder = KEPT / hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    emulation = Emulation(libraries=folder / "lib", programs=folder / "bin", checked=folder / "checked")
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers test at once
        if not (folder / "done").is_file():
            _build(emulation)
            (folder / "done").touch()
    return emulation


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.is_file())


def _build(emulation: Emulation) -> None:
    for place in (emulation.libraries, emulation.programs, emulation.checked):
        place.mkdir(parents=True, exist_ok=True)
    for name, source in _LIBRARIES.items():
        command = ["g++", *_FLAGS, str(SOURCES / source), f"-Wl,-soname,{name}", "-o", str(emulation.libraries / name)]
        subprocess.run(command, check=True)
    for place in (emulation.programs, emulation.checked):
        for path in _sources():
            shutil.copy(path, place)
        compiler = place / "nvcc"
        shutil.copy(SOURCES / "nvcc.py", compiler)
        compiler.chmod(0o755)
