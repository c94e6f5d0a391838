#!/usr/bin/env python3
"""Stands where nvcc is looked for: compiles kernels for the emulated device, with the C++ compiler of this machine.

A result is kept beside this file under the hash of all that it depends on. In a folder called `checked` it makes
kernels that check every access to memory (access_check.h).
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent  # holds the sources of the emulated device
VERSION = "Cuda compilation tools, release 13.0, V13.0.0\n"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
SOURCES = ("emulated_kernels.cpp", "emulated_device.cpp", "access_check.cpp")
CHECKS = HERE.name == "checked"
CHECKED = ("-DEMULATED_CHECKED",)
CALLS = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")


def compile_all(sources: Path, macros: list[str], out: Path) -> int:
    """Exit code. The kernels alone are checked: the device that runs them does as it likes."""
    objects = []
    for name in SOURCES:
        flags = [*FLAGS, *macros, *(CHECKED if CHECKS else ()), *(CALLS if CHECKS and name == SOURCES[0] else ())]
        objects.append(f"{out}.{name}.o")
        command = ["g++", *flags, "-I", str(sources), "-I", str(HERE), "-c", str(HERE / name), "-o", objects[-1]]
        done = subprocess.run(command, check=False)
        if done.returncode:
            return done.returncode
    done = subprocess.run(["g++", "-shared", *objects, "-o", str(out)], check=False)
    for each in objects:
        Path(each).unlink()
    return done.returncode


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
    texts = [path.read_bytes() for folder in (source.parent, HERE) for path in sorted(folder.glob("*.c*"))]
    texts += [path.read_bytes() for path in sorted(HERE.glob("*.h"))]
    key = hashlib.sha256(b"\0".join([*texts, *(each.encode() for each in (*macros, *FLAGS))])).hexdigest()[:24]
    kept = Path(os.environ.get("INGOT_EMULATED_CACHE", HERE)) / f"{key}.so"
    if not kept.is_file():
        fresh = kept.with_suffix(f".{os.getpid()}")
        if code := compile_all(source.parent, macros, fresh):
            return code
        fresh.replace(kept)
    shutil.copyfile(kept, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
