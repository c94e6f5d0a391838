"""Which kernels are tested on this machine."""

import functools

import pytest

from ingot.plugins.cpu.native import kernel_table, offered_isas
from tests.plugins.cpu.one_step import runnable_isa

COMPILED = frozenset(kernel_table())


@functools.cache
def offered() -> frozenset[str]:
    """Not asked as this file is read: the trap for tile instructions (tests/native/tile_trap.cpp) would come before
    pytest's own handler of SIGILL, which would replace it."""
    return frozenset(offered_isas())


@pytest.hookimpl(tryfirst=True)  # before the cases of every day are drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Emulated kernels stand in for those of instructions that this machine lacks: of the two, one is tested. `make
    sanitize` tests both where it can."""
    if not config.getoption("--emulated-twins"):
        left_out = [item for item in items if _has_a_better_twin(_kernel(item))]
        items[:] = [item for item in items if not _has_a_better_twin(_kernel(item))]
        config.hook.pytest_deselected(items=left_out)


def _has_a_better_twin(kernel: str) -> bool:
    if kernel.count(".") != 2:
        return False
    level = kernel.rsplit(".", 1)[1]
    if level.endswith("emu"):
        return level.removesuffix("emu") in offered()
    return level not in offered() and f"{kernel}emu" in COMPILED


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A kernel that cannot run here is skipped before its weights and its reference are computed."""
    if (kernel := _kernel(item)).count(".") == 2:
        runnable_isa(kernel)


def _kernel(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("kernel", "")) if callspec else ""
