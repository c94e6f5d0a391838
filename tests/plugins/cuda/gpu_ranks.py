"""Processes for the ranks of GPU engines in tests: each has the emulated GPUs of one machine."""

import os

from ingot.plugins.cuda import exchanges, nccl, products
from tests.plugins.cuda.emulation import build_emulation

GPUS = 4
MANY = 600  # numbers from which on ranks add shares: those of prompts


def take_emulation() -> None:
    """For the rest of this process: the emulated driver, libraries and compiler."""
    emulation = build_emulation()
    os.environ["PATH"] = str(emulation.programs) + os.pathsep + os.environ["PATH"]
    products._NAMES = (str(emulation.libraries / "libcublasLt.so.13"),)
    nccl._NAMES = (str(emulation.libraries / "libnccl.so.2"),)
    exchanges.MANY = MANY
    emulation.driver().emulated_set_devices(GPUS)
