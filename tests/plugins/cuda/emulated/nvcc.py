#!/usr/bin/env python3
"""Stands where nvcc is looked for: "compiles" kernels for the emulated device, with the C++ compiler of this machine.

What it makes is a list of files of kernels. The emulated driver has a file compiled, by this program again, when the
first of its kernels is asked for: most tests ask for few. A result is kept beside this file under the hash of all that
it depends on. In a folder called `checked` it makes kernels that check every access to memory (access_check.h).
"""

import contextlib
import fcntl
import functools
import hashlib
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from units import UNITS, seen_by, units_of  # type: ignore[import-not-found]  # it lies beside this program

HERE = Path(__file__).resolve().parent  # holds the sources of the emulated device
VERSION = "Cuda compilation tools, release 13.0, V13.0.0\n"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
KERNELS = "emulated_kernels.cpp"
DEVICE = ("emulated_device.cpp", "group_products.cpp", "access_check.cpp")
HEADER = "before_kernels.h"
CHECKS = HERE.name == "checked"
CHECKED = ("-DEMULATED_CHECKED",) if CHECKS else ()
CALLS = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0") if CHECKS else ()


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """No other process makes the same meanwhile."""
    with (HERE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def keep(name: str, make: Callable[[Path], int]) -> Path:
    """The file of that name among those that are kept; made where it is not there yet, once for all processes."""
    kept = HERE / name
    if not kept.is_file():
        with alone(name):
            if not kept.is_file():
                fresh = kept.with_suffix(f".fresh{kept.suffix}")
                if code := make(fresh):
                    sys.exit(code)
                fresh.replace(kept)
    return kept


def compile_one(name: str, flags: Sequence[str], out: Path) -> int:
    """Exit code."""
    command = ["g++", *FLAGS, *CHECKED, *flags, "-I", str(HERE), "-c", str(HERE / name), "-o", str(out)]
    return subprocess.run(command, check=False).returncode


def compile_unit(unit: str, sources: Path, macros: Sequence[str], out: Path) -> int:
    """Exit code. The kernels alone are checked: the device that runs them does as it likes."""
    device = [keep(f"{key_of(name.encode())}.o", functools.partial(compile_one, name, ())) for name in DEVICE]
    kernels = Path(f"{out}.o")
    keep(f"{HEADER}.gch", functools.partial(compile_one, HEADER, (*CALLS, "-x", "c++-header")))  # half of the work
    chosen = (f'-DEMULATED_UNIT="{unit}"', f"-DEMULATED_{unit.removesuffix('.cu')}", "-include", str(HERE / HEADER))
    if code := compile_one(KERNELS, (*macros, *chosen, *CALLS, "-I", str(sources)), kernels):
        return code
    done = subprocess.run(["g++", "-shared", kernels, *device, "-o", str(out)], check=False)
    kernels.unlink()
    return done.returncode


@functools.cache
def _beside() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".h", ".cpp"))


def key_of(*texts: bytes) -> str:
    """Names what is made of these texts, of what lies here and of this program's flags."""
    flags = " ".join((*FLAGS, *CHECKED, *CALLS)).encode()
    return hashlib.sha256(b"\0".join((*_beside(), *texts, flags))).hexdigest()[:24]


def key_of_unit(unit: str, sources: Path, macros: Sequence[str]) -> tuple[str, list[str]]:
    """(name of what the file becomes, the macros that it sees)."""
    seen, texts = seen_by(unit, sources, macros)
    return f"{key_of(unit.encode(), *texts, *(each.encode() for each in seen))}.so", seen


def listed(sources: Path, macros: Sequence[str]) -> bytes:
    """The machine code of the emulated device: after the header of an ELF file a line for each file of kernels, with
    what it becomes, how the names of its kernels begin, and the command that compiles it."""
    lines = []
    for unit in units_of(macros):
        key, seen = key_of_unit(unit, sources, macros)
        command = shlex.join([sys.executable, str(HERE / "nvcc"), "--unit", unit, key, str(sources), *seen])
        lines.append(f"{HERE / key}\t{' '.join(UNITS[unit])}\t{command}\n")
    text = "".join(lines).encode() + b"\0"
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 1, 190, 1, 0, 0, 64 + len(text), 0, 64, 0, 0, 64, 0, 0)
    return header + text


def main(arguments: list[str]) -> int:
    if "--version" in arguments:
        print(VERSION)
        return 0
    if "--list-gpu-code" in arguments:
        print("\n".join(f"sm_{number}" for number in (80, 86, 89, 90, 100, 120)))
        return 0
    if arguments[0] == "--unit":
        _, unit, key, place, *macros = arguments
        sources = Path(place)
        if key_of_unit(unit, sources, macros) != (key, macros):
            print(f"{sources / unit} is no longer what the machine code was made of", file=sys.stderr)
            return 1
        keep(key, functools.partial(compile_unit, unit, sources, macros))
        return 0
    source = Path(next(each for each in arguments if each.endswith(".cu")))
    macros = sorted(each for each in arguments if each.startswith("-D"))
    Path(arguments[arguments.index("-o") + 1]).write_bytes(listed(source.parent, macros))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
