"""The TensorRT-RTX library: whether its wheels are here, of which version, and what to install otherwise."""

import dataclasses
import importlib.metadata
import importlib.util
from pathlib import Path

from ingot.errors import install

VERSION = "1.7.1"  # engines run with exactly the version that built them
WHEELS = ("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings")
INSTALL = f"{install('tensorrt-rtx')}, or {' '.join(f'{wheel}=={VERSION}.*' for wheel in WHEELS)}"

_MODULES = ("tensorrt_rtx_libs", "tensorrt_rtx_bindings")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """An installed TensorRT. module: its Python bindings; folder: where its shared libraries lie."""

    name: str
    version: str
    module: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def find_rtx() -> Library | str:
    """The library, or why there is none and what to install. Loads nothing."""
    missing = [wheel for wheel, module in zip(WHEELS, _MODULES, strict=True) if _folder(module) is None]
    if missing:
        return f"TensorRT-RTX is not installed (no {' and no '.join(missing)}); {INSTALL}"
    versions = {wheel: importlib.metadata.version(wheel) for wheel in WHEELS}
    if any(not version.startswith(VERSION + ".") for version in versions.values()) or len(set(versions.values())) > 1:
        found = ", ".join(f"{wheel} {version}" for wheel, version in versions.items())
        return f"TensorRT-RTX must be {VERSION}, both wheels of one version; here are {found}; {INSTALL}"
    libs, bindings = _MODULES
    folder = _folder(libs)
    assert folder is not None, "looked for above"
    return Library(name="TensorRT-RTX", version=versions[WHEELS[0]], module=bindings, folder=folder)


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
