"""What this ingot was built from: the commit, the compiler, and the levels of instructions that have kernels."""

import json
import platform
from pathlib import Path

import ingot
from ingot.plugins.cpu.native import kernel_table

BUILD_FILE = Path(ingot.__file__).with_name("build.json")  # CMake writes it
_UNKNOWN = {"commit": "unknown", "compiler": "unknown"}


def read_build_info() -> dict[str, str]:
    """What `ingot --version` prints, by name."""
    built = {**_UNKNOWN, **json.loads(BUILD_FILE.read_text())} if BUILD_FILE.is_file() else _UNKNOWN
    levels = sorted({name.rpartition(".")[2] for name in kernel_table()})
    return {
        "commit": built["commit"],
        "compiler": built["compiler"],
        "kernels": ", ".join(levels) or "none: the compiled CPU module is not here",
        "Python": platform.python_version(),
    }
