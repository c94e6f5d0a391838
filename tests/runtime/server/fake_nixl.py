"""What ingot uses of NIXL, for machines without it: agents of one process that copy memory as UCX does without RDMA.

    transfer ──▶ waits at the agent that is read ──its get_new_notifs──▶ bytes ──▶ DONE

It does what NIXL 1.5 does where that is easily forgotten: nothing moves unless the agent that is read looks, bytes
come although the handle was released, and nobody checks the memory that they come from or go to. Here `violations` has
what went wrong.
"""

import ctypes
import itertools
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

PLACE = tuple[int, int]  # address, bytes


class FakeDisconnectError(Exception):
    """Of no class that ingot knows, as NIXL's are."""


class FakeHandle:
    """A read."""

    def __init__(self, reader: "FakeAgent", own: PLACE, other: PLACE, name: str) -> None:
        self.reader, self.own, self.other, self.name = weakref.ref(reader), own, other, name
        self.state = "NEW"


class FakeNixl:
    """stopped: no agent looks. lost: names whose connections are down. half: called when half of a read has come."""

    def __init__(self) -> None:
        self.agents: weakref.WeakValueDictionary[str, FakeAgent] = weakref.WeakValueDictionary()
        self.plugins, self.stopped, self.lost = ["UCX"], False, set[str]()
        self.violations: list[str] = []
        self.began: Callable[[FakeHandle], None] = lambda _: None
        self.half: Callable[[], None] = lambda: None
        self.broken: Exception | None = None
        self.serial = itertools.count()

    def module(self) -> Any:
        """In the place of `nixl`."""

        def nixl_agent(name: str, config: Any) -> FakeAgent:
            assert not config.enable_prog_thread, "it would take a core"
            assert config.backends == ["UCX"]
            return FakeAgent(self, name)

        def nixl_agent_config(enable_prog_thread: bool = True, backends: list[str] | None = None) -> Any:
            return SimpleNamespace(enable_prog_thread=enable_prog_thread, backends=backends)

        return SimpleNamespace(nixl_agent=nixl_agent, nixl_agent_config=nixl_agent_config)

    def lose(self) -> None:
        """Every connection."""
        self.lost |= set(self.agents)


class FakeAgent:
    """The surface: a method that is not here is none that ingot may call."""

    def __init__(self, nixl: FakeNixl, name: str) -> None:
        self._nixl, self._name = nixl, name
        self._registered: dict[int, int] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._waiting: list[FakeHandle] = []
        nixl.agents[name] = self

    def get_plugin_list(self) -> list[str]:
        return self._nixl.plugins

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> Any:
        assert kind == "DRAM"
        self._registered |= {address: nbytes for address, nbytes, _, _ in places}
        return [address for address, *_ in places]

    def deregister_memory(self, registered: Any) -> None:
        for address in registered:
            del self._registered[address]

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self._name, self._registered]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, registered = json.loads(metadata)
        if name in self._nixl.lost or name not in self._nixl.agents:
            raise FakeDisconnectError("NIXL_ERR_BACKEND")
        self._known[name] = registered
        return str(name).encode()

    def remove_remote_agent(self, name: bytes) -> None:
        del self._known[name.decode()]

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> Any:
        assert kind == "DRAM"
        ((address, nbytes, device),) = places
        assert device == 0
        return address, nbytes

    def initialize_xfer(self, operation: str, own: PLACE, other: PLACE, name: bytes) -> FakeHandle:
        assert operation == "READ"
        for (address, nbytes), memory in ((own, self._registered), (other, self._known[name.decode()])):
            inside = [int(begin) <= address and address + nbytes <= int(begin) + size for begin, size in memory.items()]
            if not any(inside):
                raise FakeDisconnectError("NIXL_ERR_NOT_FOUND")
        return FakeHandle(self, own, other, name.decode())

    def transfer(self, handle: FakeHandle) -> str:
        self._nixl.began(handle)
        if handle.name in self._nixl.lost or (peer := self._nixl.agents.get(handle.name)) is None:
            raise FakeDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        handle.state = "PROC"
        peer._waiting.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: FakeHandle) -> str:
        if handle.state == "PROC" and (handle.name in self._nixl.lost or handle.name not in self._nixl.agents):
            handle.state = "ERR"
        if handle.state == "ERR":
            raise FakeDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state

    def release_xfer_handle(self, handle: FakeHandle) -> None:
        """It says that it has: see the top."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        if self._nixl.broken is not None:
            raise self._nixl.broken
        while self._waiting and not self._nixl.stopped and self._name not in self._nixl.lost:
            self._send(self._waiting.pop(0))
        return {}

    def _send(self, handle: FakeHandle) -> None:
        reader = handle.reader()
        if reader is None or handle.state != "PROC":
            return
        (own, nbytes), (other, _) = handle.own, handle.other
        for begin, count, then in ((0, nbytes // 2, self._nixl.half), (nbytes // 2, -(-nbytes // 2), lambda: None)):
            if own not in reader._registered:
                self._nixl.violations.append("bytes come into memory that was given back")
                return
            ctypes.memmove(own + begin, other + begin, count)
            then()
            if self._name in self._nixl.lost:
                return
        handle.state = "DONE"


def fake_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNixl]:
    """In the place of `nixl`, if it is installed or not."""
    fake = FakeNixl()
    monkeypatch.setitem(sys.modules, "nixl", fake.module())
    yield fake
    assert fake.violations == []
