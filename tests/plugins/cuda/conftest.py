"""The emulated GPU as a fixture, and the machine's own in its place."""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from ingot.plugins.cuda import compiler, nccl, products
from ingot.plugins.cuda.gpu import Device
from tests.plugins.cuda.emulation import KEPT, Emulation, build_emulation, one_context
from tests.plugins.cuda.kept_code import kept_on_disk


@pytest.fixture(scope="session")
def emulation() -> Emulation:
    """Compiled libraries and compiler of the emulated GPU."""
    return build_emulation()


class RealDriver(ctypes.CDLL):
    """The machine's own. It has nothing that asks or steers the emulated one: a test that needs that is skipped."""

    def __getattr__(self, name: str) -> Any:
        if name == "emulated_run_backwards":  # warps run in no order that a test could ask for
            return lambda yes: None
        if name.startswith("emulated_"):
            pytest.skip(f"{name} is of the emulated driver alone")
        return super().__getattr__(name)


@pytest.fixture(scope="session")
def real_context() -> Iterator[None]:
    """One context of the machine's GPU for all tests."""
    with one_context():
        yield


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """This process has a GPU of sm_90 and a compiler for it while the test runs. Gives the emulated driver.

    With --real-gpu it is the machine's own: what would steer the emulation does nothing.
    """
    if request.config.getoption("--real-gpu"):
        request.getfixturevalue("real_context")
        monkeypatch.setattr(compiler, "_compiled", kept_on_disk(KEPT / "cubins", compiler._compiled))
        yield RealDriver(None)
        return
    emulation: Emulation = request.getfixturevalue("emulation")
    monkeypatch.setenv("PATH", str(emulation.programs) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(products, "_NAMES", (str(emulation.libraries / "libcublasLt.so.13"),))  # not the real one
    monkeypatch.setattr(nccl, "_NAMES", (str(emulation.libraries / "libnccl.so.2"),))
    driver = emulation.driver()
    driver.emulated_let_others_take.argtypes = [ctypes.c_size_t]
    driver.emulated_taken.restype = ctypes.c_size_t
    driver.emulated_set_devices(1)
    yield driver
    driver.emulated_run_backwards(0)
    driver.emulated_let_others_take(0)
    driver.emulated_set_devices(0)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every graph that is replayed while the test runs, in turn."""
    replayed: list[object] = []
    replay = Device.replay

    def counted(device: Device, graph: object) -> None:
        replayed.append(graph)
        replay(device, graph)

    monkeypatch.setattr(Device, "replay", counted)
    return replayed
