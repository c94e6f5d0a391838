"""The binding of NCCL: found, too old, missing; its calls by themselves and in a graph, with one rank."""

import contextlib
import ctypes
import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.doctor import examine
from ingot.errors import TargetError
from ingot.plugins.cuda import nccl
from ingot.plugins.cuda.gpu import Device, find_gpus
from ingot.plugins.cuda.nccl import Communicator, find_nccl, require_nccl
from ingot.plugins.cuda.wheels import in_wheels

COUNT = 40


@pytest.fixture
def library(gpu: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Whatever a test makes, it gives back."""
    found = require_nccl().library
    yield found
    if hasattr(found, "emulated_nccl_held"):
        found.emulated_nccl_set_version(22807)
        assert found.emulated_nccl_held() == 0


def _fetched(device: Device, place: int) -> list[float]:
    found = np.empty(COUNT, np.float32)
    device.fetch(found, place)
    device.wait()
    return list(found)


def test_one_rank(library: ctypes.CDLL) -> None:
    with contextlib.closing(Device(find_gpus().gpus[0])) as device:
        x, y, z = (device.allocate(4 * COUNT) for _ in range(3))
        found = require_nccl()
        group = Communicator(found, found.new_id(), 0, 1, device.stream_address)

        def calls() -> None:
            group.all_gather(y, x, COUNT)
            with group.together():
                group.send(y, COUNT, 0)
                group.receive(z, COUNT, 0)

        def check(run: Callable[[], None], values: np.ndarray) -> None:
            device.upload(x, values.astype(np.float32))
            device.upload(z, np.zeros(COUNT, np.float32))
            run()
            assert _fetched(device, z) == list(values)

        numbers = np.arange(COUNT)
        check(calls, numbers)
        device.upload(z, np.zeros(COUNT, np.float32))
        graphs = contextlib.ExitStack()
        graph = device.capture(calls, graphs)
        assert _fetched(device, z) == [0] * COUNT, "captured, not run"
        check(lambda: device.replay(graph), 2 * numbers)
        check(lambda: device.replay(graph), 3 * numbers)
        group.require_well()
        with pytest.raises(TargetError, match=r"NCCL reports an error(.|\n)*ncclSend"):
            group.send(x, COUNT, 3)
        closing = threading.Thread(target=group.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive(), "a graph holds calls"
        graphs.close()
        closing.join(20)
        assert not closing.is_alive()
        group.abort()  # too late: nothing is left
        with pytest.raises(TargetError, match="was ended"):
            group.all_gather(y, x, COUNT)


def test_an_aborted_communicator_ends_what_waits(library: ctypes.CDLL) -> None:
    if not hasattr(library, "emulated_nccl_held"):
        pytest.skip("the real library lets no rank wait for itself")
    with contextlib.closing(Device(find_gpus().gpus[0])) as device:
        found, x = require_nccl(), device.allocate(4 * COUNT)
        group = Communicator(found, found.new_id(), 0, 1, device.stream_address)
        group.receive(x, COUNT, 0)  # nobody sends
        looks: list[int] = []

        def watch() -> None:
            looks.append(len(looks))
            if len(looks) == 3:
                aborting.start()

        aborting = threading.Thread(target=group.abort)
        device.watch = watch
        device.wait()
        assert len(looks) >= 3
        aborting.join(20)
        assert not aborting.is_alive()
        device.watch = None


def test_versions(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(library, "emulated_nccl_set_version"):
        pytest.skip("the real library has one version")
    for number, words in ((21803, "NCCL 2.18.3"), (23003, "NCCL 2.30.3")):
        library.emulated_nccl_set_version(number)
        assert str(find_nccl()) == words
    for number, words in ((21701, "NCCL 2.17.1"), (2708, "NCCL 2.7.8")):
        library.emulated_nccl_set_version(number)
        assert str(find_nccl()).startswith(f"{words} is too old, expected 2.18 or newer; pip install ")
    with pytest.raises(TargetError, match=r"has no NCCL(.|\n)*too old"):
        require_nccl()
    assert examine().cuda["exchange between ranks"].startswith("only engines of one rank run on a GPU without it")


def test_a_machine_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_NAMES", ("libnothing.so.2",))
    monkeypatch.setattr(nccl, "in_wheels", lambda names, parts: [])
    assert str(find_nccl()).startswith("NCCL is not here; pip install ")


def test_wheels_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia"
    spec = importlib.util.spec_from_loader("nvidia", None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert in_wheels(("libnccl.so.2",), ("nccl/lib",)) == []
    path = folder / "nccl" / "lib" / "libnccl.so.2"
    path.parent.mkdir(parents=True)
    path.touch()
    assert in_wheels(("libnccl.so.2",), ("nccl/lib",)) == [str(path)]
