"""Which MPI starts the ranks of tests."""

import functools
import subprocess

from ingot.runtime.distributed import find_mpirun


@functools.cache
def is_mpich() -> bool:
    """Whether it is MPICH, whose launcher is called Hydra."""
    command = [find_mpirun() or "true", "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("HYDRA")
