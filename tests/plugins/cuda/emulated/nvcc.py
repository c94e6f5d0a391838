#!/usr/bin/env python3
"""Stands where nvcc is looked for: compiles kernels for the emulated device, with the C++ compiler of this machine.

A result is kept beside this file under the hash of all that it depends on. In a folder called `checked` it makes
kernels that check every access to memory (access_check.h).
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent  # holds the sources of the emulated device
VERSION = "Cuda compilation tools, release 13.0, V13.0.0\n"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
KERNELS, DEVICE = "emulated_kernels.cpp", ("emulated_device.cpp", "group_products.cpp", "access_check.cpp")
CHECKS = HERE.name == "checked"
CHECKED = ("-DEMULATED_CHECKED",) if CHECKS else ()
CALLS = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0") if CHECKS else ()


def keep(name: str, make: Callable[[Path], int]) -> Path:
    """The file of that name among those that are kept; made where it is not there yet, for all processes at once."""
    kept = Path(os.environ.get("INGOT_EMULATED_CACHE", HERE)) / name
    if not kept.is_file():
        fresh = kept.with_suffix(f".{os.getpid()}{kept.suffix}")
        if code := make(fresh):
            sys.exit(code)
        fresh.replace(kept)
    return kept


def compile_one(name: str, flags: Sequence[str], out: Path) -> int:
    """Exit code."""
    command = ["g++", *FLAGS, *CHECKED, *flags, "-I", str(HERE), "-c", str(HERE / name), "-o", str(out)]
    return subprocess.run(command, check=False).returncode


def compile_all(sources: Path, macros: Sequence[str], device: Sequence[Path], out: Path) -> int:
    """Exit code. The kernels alone are checked: the device that runs them does as it likes."""
    kernels = Path(f"{out}.o")
    if code := compile_one(KERNELS, (*macros, *CALLS, "-I", str(sources)), kernels):
        return code
    done = subprocess.run(["g++", "-shared", kernels, *device, "-o", str(out)], check=False)
    kernels.unlink()
    return done.returncode


def key_of(*texts: bytes) -> str:
    """Names what is made of these texts and of this program's flags."""
    flags = " ".join((*FLAGS, *CHECKED, *CALLS)).encode()
    return hashlib.sha256(b"\0".join((*texts, flags))).hexdigest()[:24]


def main(arguments: list[str]) -> int:
    if "--version" in arguments:
        print(VERSION)
        return 0
    if "--list-gpu-code" in arguments:
        print("\n".join(f"sm_{number}" for number in (80, 86, 89, 90, 100, 120)))
        return 0
    source = Path(next(each for each in arguments if each.endswith(".cu")))
    macros = sorted(each for each in arguments if each.startswith("-D"))
    out = Path(arguments[arguments.index("-o") + 1])
    here = [path.read_bytes() for path in sorted(HERE.glob("*.[ch]*"))]
    device = [keep(f"{key_of(name.encode(), *here)}.o", functools.partial(compile_one, name, ())) for name in DEVICE]
    kernels = [path.read_bytes() for path in sorted(source.parent.glob("*.c*"))]
    name = f"{key_of(*here, *kernels, *(each.encode() for each in macros))}.so"
    shutil.copyfile(keep(name, functools.partial(compile_all, source.parent, macros, device)), out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
