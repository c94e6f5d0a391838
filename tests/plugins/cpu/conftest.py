"""Which kernels are tested on this machine."""

import pytest

from ingot.plugins.cpu.native import offered_isas
from tests.plugins.cpu.one_step import runnable_isa


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Emulated kernels stand in for those of instructions that this machine lacks. Where it has the instructions, their
    kernels are tested, and `make sanitize` tests both."""
    if not config.getoption("--emulated-twins"):
        stood_for = tuple(f".{level}emu" for level in offered_isas())
        left_out = [item for item in items if _kernel(item).endswith(stood_for)]
        items[:] = [item for item in items if not _kernel(item).endswith(stood_for)]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A kernel that cannot run here is skipped before its weights and its reference are computed."""
    if (kernel := _kernel(item)).count(".") == 2:
        runnable_isa(kernel)


def _kernel(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("kernel", "")) if callspec else ""
