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
    for module, name in ((products, "libcublasLt.so.13"), (nccl, "libnccl.so.2")):
        setattr(module, "_NAMES", (str(emulation.libraries / name),))  # noqa: B010
    exchanges.MANY = MANY
    emulation.driver().emulated_set_devices(GPUS)
