"""CUDA C++ → machine code of one architecture (a cubin), on a machine that needs no GPU.

The compiler is the machine's own nvcc, or that of the wheel nvidia-cuda-nvcc. Kernels are compiled for one engine at a
time: its types, head size and block size are constants in the code. Heads of another size have code of their own.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ingot.dtypes import DType
from ingot.errors import BuildError
from ingot.plugins.target import Progress

SOURCES = Path(__file__).with_name("kernels")
INSTALL = "pip install nvidia-cuda-nvcc, or install the CUDA toolkit 12.8 or newer"
MISSING = f"there is no CUDA compiler (nvcc) here; {INSTALL}"

_TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"))
_KV_CODES = {DType.I8: "Int8Codes", DType.F8: "Fp8Codes"}
_IN_WHEELS = ("cu13", "cu12", "cuda_nvcc")  # folders of the namespace package `nvidia` that may hold bin/nvcc


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """An nvcc. origin: where it is from, for people; architectures: "sm_80", ..."""

    path: Path
    origin: str
    version: str
    architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Specialisation:
    """What is constant in the code of an engine. weight: of floats, also the type that products take; codes: formats of
    the quantised weights beside them; experts: there are mixtures of experts; states: there are layers that keep one;
    latent: where attention is latent, how many numbers of a row of the cache are its value; alone: nothing but the
    kernels that depend on the size of heads; kv_codes: of a KV cache, which attention multiplies as `kv`;
    wide: products of more than a few rows by the instructions of warpgroups, which sm_90a alone has;
    warpgroups: attention of prompts takes the instructions of warpgroups, which sm_90a alone has;
    fp8: products with inputs in FP8, by warpgroups where the others are, else by warps (sm_89 and newer)."""

    weight: DType
    kv: DType
    head_dim: int
    tokens_per_block: int
    codes: tuple[DType, ...] = ()
    experts: bool = False
    states: bool = False
    latent: int = 0
    alone: bool = False
    kv_codes: DType | None = None
    wide: bool = False
    warpgroups: bool = False
    fp8: bool = False

    @property
    def macros(self) -> tuple[str, ...]:
        """For the command line of the compiler."""
        return (
            f"-DINGOT_WEIGHT={self.weight.name}",
            f"-DINGOT_KV={self.kv.name}",
            f"-DINGOT_HEAD_DIM={self.head_dim}",
            f"-DINGOT_TOKENS_PER_BLOCK={self.tokens_per_block}",
            *(("-DINGOT_KV_IS_F32",) if self.kv is DType.F32 else ()),
            *((f"-DINGOT_KV_CODES={_KV_CODES[self.kv_codes]}",) if self.kv_codes else ()),
            *(("-DINGOT_WEIGHT_IS_F32",) if self.weight is DType.F32 else ()),
            *(("-DINGOT_CODES",) if self.codes else ()),
            *(f"-DINGOT_CODES_{each.name}" for each in self.codes),
            *(("-DINGOT_EXPERTS",) if self.experts else ()),
            *(("-DINGOT_STATES",) if self.states else ()),
            *((f"-DINGOT_LATENT={self.latent}",) if self.latent else ()),
            *(("-DINGOT_ATTENTION_ALONE",) if self.alone else ()),
            *(("-DINGOT_WIDE",) if self.wide else ()),
            *(("-DINGOT_WARPGROUPS",) if self.warpgroups else ()),
            *(("-DINGOT_FP8",) if self.fp8 else ()),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What ptxas says of one kernel: registers of a thread; bytes of stack, spills and static shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MachineCode:
    """A cubin, and what each of its kernels takes."""

    image: bytes
    kernels: dict[str, Resources]


def find_compiler() -> Compiler | None:
    """The first nvcc that answers: on the path, in the usual folders of the toolkit, in wheels."""
    return next((found for path, origin in _candidates() if (found := _ask(path, origin)) is not None), None)


def _candidates() -> Iterator[tuple[Path, str]]:
    if (on_path := shutil.which("nvcc")) is not None:
        yield Path(on_path), "on the path"
    for toolkit in _TOOLKITS:
        yield toolkit / "bin" / "nvcc", "CUDA toolkit"
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for part in _IN_WHEELS:
            yield Path(folder) / part / "bin" / "nvcc", "wheel nvidia-cuda-nvcc"


@functools.cache
def _ask(path: Path, origin: str) -> Compiler | None:
    if not path.is_file():
        return None
    try:
        version = _output([str(path), "--version"])
        architectures = _output([str(path), "--list-gpu-code"]).split()
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release [\d.]+, V([\d.]+)", version)
    return Compiler(
        path=path,
        origin=origin,
        version=release[1] if release else "of unknown version",
        architectures=tuple(architectures),
    )


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def why_not(architecture: str) -> str | None:
    """Why this machine cannot compile for an architecture, and what to install; None if it can."""
    compiler = find_compiler()
    if compiler is None:
        return MISSING
    if architecture.rstrip("a") not in compiler.architectures:
        return f"nvcc {compiler.version} ({compiler.origin}) does not know {architecture}; {INSTALL}"
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return f"nvcc {compiler.version} ({compiler.origin}) needs a C++ compiler beside it; apt install g++"
    return None


def compile_kernels(
    specialisation: Specialisation, architecture: str, progress: Progress = lambda what, done, total: None
) -> MachineCode:
    """All kernels for `architecture` ("sm_90a"). Raises BuildError with what the compiler said."""
    if (reason := why_not(architecture)) is not None:
        raise BuildError(
            "the CUDA kernels cannot be compiled", where=architecture, got=reason, hint="build for another --target"
        )
    compiler = find_compiler()
    assert compiler is not None, "why_not found it"
    return _compiled(
        _Work(
            compiler=compiler,
            sources=SOURCES,
            specialisation=specialisation,
            architecture=architecture,
            progress=progress,
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """All that machine code depends on, and who hears of it."""

    compiler: Compiler
    sources: Path
    specialisation: Specialisation
    architecture: str
    progress: Progress = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=16)
def _compiled(work: _Work) -> MachineCode:
    compiler, architecture = work.compiler, work.architecture
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        out = Path(folder) / "kernels.cubin"
        virtual = architecture.replace("sm_", "compute_")
        command = [
            str(compiler.path),
            "-cubin",
            "-O3",
            "-std=c++17",
            "-Xptxas",
            "-v",
            "-gencode",
            f"arch={virtual},code={architecture}",
            *work.specialisation.macros,
            str(work.sources / "kernels.cu"),
            "-o",
            str(out),
        ]
        code, said = run_program(
            command, f"compiling kernels for {architecture} with nvcc {compiler.version}", work.progress
        )
        if code != 0 or not out.is_file():
            lines = "\n".join(said.strip().splitlines()[:8])
            raise BuildError(
                "the CUDA compiler failed",
                where=f"nvcc {compiler.version} ({compiler.origin}), {architecture}",
                got=lines or f"exit code {code}",
                hint=INSTALL,
            )
        return MachineCode(image=out.read_bytes(), kernels=read_report(said))


def run_program(
    command: list[str], stage: str, progress: Progress, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """(exit code, what it printed). progress hears every second that the work goes on."""
    progress(stage, 0, 0)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    ) as process:
        try:
            for seconds in itertools.count(1):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(timeout=1)
                    break
                progress(stage, seconds, 0)
        except BaseException:  # interrupted: neither nvcc nor the programs that it started go on alone
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, said


def read_report(text: str) -> dict[str, Resources]:
    """The kernels in what `-Xptxas -v` prints."""
    found = {}
    for name, body in re.findall(r"Function properties for (\w+)\n(.*\n.*)", text):
        numbers = {key: re.search(pattern, body) for key, pattern in _REPORT.items()}
        found[name] = Resources(**{key: int(match[1]) if match else 0 for key, match in numbers.items()})
    return found


_REPORT = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "shared": r"(\d+) bytes smem",
}
