"""The full TensorRT, which users bring: whether it is here, of which version, and what to install otherwise."""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path

from ingot.errors import install
from ingot.plugins.tensorrt.library import Library

OLDEST, NEWEST = (10, 16), 11  # from this version to the last one of this major number
INSTALL = (
    f"{install('tensorrt')} (tensorrt-cu13, 10.16 to 11.x), or install NVIDIA's package of TensorRT and, of its very "
    "version, tensorrt-cu13-bindings"
)

_MODULES = ("tensorrt", "tensorrt_bindings")  # of the whole wheel, of the bindings alone
_WHEELS = ("tensorrt-cu13", "tensorrt-cu13-bindings", "tensorrt-cu12", "tensorrt-cu12-bindings", "tensorrt")
_LIBS = "tensorrt_libs"


def find_tensorrt() -> Library | str:
    """The library, or why there is none and what to install. Opens its core library, where the bindings are here."""
    module = next((name for name in _MODULES if importlib.util.find_spec(name) is not None), None)
    version = next((found for wheel in _WHEELS if (found := _version(wheel)) is not None), None)
    if module is None or version is None:
        return f"TensorRT is not installed (no Python module tensorrt); {INSTALL}"
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST or major > NEWEST:
        return f"TensorRT must be 10.16 to 11.x; here is {version}; {INSTALL}"
    folder = _folder(f"libnvinfer.so.{major}")
    if folder is None:
        return (
            f"the bindings of TensorRT {version} are here, but libnvinfer.so.{major} is not: pip install "
            f"tensorrt-cu13-libs=={version}, or put the lib folder of NVIDIA's package on the loader's path"
        )
    return Library(name="TensorRT", version=version, module=module, folder=folder)


def _version(wheel: str) -> str | None:
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(name: str) -> Path | None:
    """Where the core library lies: in its wheel, or "." for wherever the loader finds it."""
    spec = importlib.util.find_spec(_LIBS)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if (Path(folder) / name).is_file():
            return Path(folder)
    with contextlib.suppress(OSError):
        ctypes.CDLL(name)
        return Path()
    return None
