"""KV blocks by NIXL: a decode server reads the leased memory of a prefill server, over RDMA where both have it.

    prefill server   `Arena`: memory of all leases, registered once ──▶ in the offer: agent, address
    decode server    `NixlReader`: agent, address ──READ──▶ memory of its own

Three properties of NIXL 1.5 over UCX shape this file:

- Without RDMA, the process that is read copies the bytes itself. It looks up no address: one that is not mapped any
  more ends that process. So an arena keeps its addresses as long as its agent lives.
- A READ cannot be taken back. NIXL lets go of its handle, but bytes go on to arrive. So the memory of a READ that
  nobody waits for stays until the READ has ended, or the agent.
- NIXL's thread that moves data polls without a pause and takes a core. So there is none: those who wait do its work,
  and an arena has a thread that sleeps between two looks.
"""

import base64
import contextlib
import dataclasses
import errno
import logging
import mmap
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ingot.errors import UsageError, install
from ingot.runtime.kv_transfer import Bytes

_LOG = logging.getLogger("ingot.server")
_PAUSE = 0.001  # seconds between two looks at data that move
_IDLE = 1.0  # seconds between two looks where nothing is leased
_ALIGNED = 64  # bytes of which a piece begins at a multiple
_MOST_LEFT = 1 << 30  # bytes of reads that nobody waits for


class _Agent(Protocol):
    """What is used of nixl.nixl_agent. The lists of places are opaque."""

    def get_plugin_list(self) -> list[str]: ...
    def register_memory(self, places: Sequence[tuple[int, int, int, str]], kind: str) -> object: ...
    def deregister_memory(self, registered: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> object: ...
    def remove_remote_agent(self, name: object) -> None: ...
    def get_xfer_descs(self, places: Sequence[tuple[int, int, int]], kind: str) -> object: ...
    def initialize_xfer(self, operation: str, own: object, other: object, name: object) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...
    def get_new_notifs(self) -> object: ...


def _open_agent() -> _Agent:
    """Raises UsageError where there is no NIXL, or where it cannot run."""
    raises = logging.raiseExceptions
    try:
        from nixl import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise UsageError("--kv_transport nixl needs NIXL", got=str(error), hint=install("nixl")) from error
    said = logging.getLogger("nixl")  # its import has it print to stdout
    said.handlers, said.propagate, logging.raiseExceptions = [], True, raises
    said.setLevel(logging.WARNING)
    try:
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent: _Agent = nixl_agent(f"ingot-{secrets.token_hex(8)}", config)
        plugins = agent.get_plugin_list()
    except Exception as error:  # what NIXL raises has no base of its own
        raise _unusable(str(error)) from error
    if "UCX" not in plugins:
        raise _unusable(f"plugins {', '.join(plugins)}")
    return agent


class Piece:
    """Memory of an arena. whole: uint8. place: what another server needs to read it."""

    def __init__(self, whole: Bytes, place: Mapping[str, object]) -> None:
        self.whole, self.place = whole, place

    def free(self) -> None:
        """Make the beginning unreadable. The piece goes back to the arena when nobody holds its bytes any more."""
        self.whole[:_ALIGNED] = 0
        self.whole = np.empty(0, np.uint8)


class Arena:
    """For one event loop; a thread of its own sends what is read."""

    def __init__(self, nbytes: int) -> None:
        """Raises UsageError where there is no NIXL, or no memory."""
        agent = _open_agent()
        try:
            self._memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
            agent.register_memory([(self._address, nbytes, 0, "")], "DRAM")
            self._metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        except Exception as error:  # what NIXL raises has no base of its own
            raise _unusable(f"{error}, for --lease_memory of {nbytes} bytes") from error
        self._taken: dict[int, int] = {}  # where pieces begin and end
        self._closed, self._failure = False, ""
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(agent,), name="ingot nixl", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> Piece:
        """Raises OSError where there is no room."""
        if self._failure or self._closed:
            raise OSError(errno.EIO, self._failure or "the server ends")
        size, begin = -(-nbytes // _ALIGNED) * _ALIGNED, 0
        for first, end in sorted(tuple(self._taken.items())):
            if first - begin >= size:
                break
            begin = end
        if begin + size > len(self._memory):
            raise OSError(errno.ENOMEM, f"no piece of {size} bytes is free")
        self._taken[begin] = begin + size
        whole = np.frombuffer(self._memory[begin : begin + nbytes], np.uint8)
        weakref.finalize(whole, self._taken.pop, begin)  # who reads or writes a part holds the array, too
        self._look.set()
        return Piece(whole, {"agent": self._metadata, "address": self._address + begin})

    def close(self) -> None:
        """End the agent: it sends nothing more. A reader of the same machine may look into leased memory as long as
        somebody holds that; `blocks_of` tells it whether the bytes are those of its lease."""
        self._closed = True
        self._look.set()
        self._thread.join()

    def _send(self, agent: _Agent) -> None:
        """In a thread, the only one that holds the agent: it ends with it."""
        while not self._closed:
            try:
                agent.get_new_notifs()  # there are none; it moves data
            except Exception as error:  # what NIXL raises has no base of its own
                self._failure = f"NIXL: {error or type(error).__name__}"
                _LOG.error("this server leases no more blocks, because NIXL has failed: %s; start it again", error)
                return
            if self._taken:
                time.sleep(_PAUSE)
            else:
                self._look.wait(_IDLE)
                self._look.clear()


@dataclasses.dataclass(slots=True)
class _Peer:
    """reads: how many have not ended. failed: it is connected anew before it is read again."""

    metadata: bytes
    name: object
    reads: int = 0
    failed: bool = False


@dataclasses.dataclass(slots=True)
class _Read:
    peer: _Peer
    buffer: Bytes
    registered: object
    handle: object = None


class NixlReader:
    """Thread-safe."""

    def __init__(self) -> None:
        """Raises UsageError where there is no NIXL."""
        self._agent: _Agent | None = _open_agent()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}  # by URL
        self._left: list[_Read] = []  # nobody waits for them, but their bytes may still come

    def read(self, url: str, agent: str, address: int, nbytes: int, require_wanted: Callable[[], None]) -> Bytes:
        """Memory of the server at `url`: see `Piece.place`. Raises ConnectionError, and what `require_wanted` raises,
        which is called again and again."""
        with self._lock:
            read = self._begin(url, agent, address, nbytes)
        while True:
            with self._lock:
                if self._has_come(read):
                    return read.buffer
                try:
                    require_wanted()
                except BaseException:
                    self._left.append(read)
                    raise
            time.sleep(_PAUSE)

    def close(self) -> None:
        """End the agent, and only then give back the memory of reads that have not ended."""
        with self._lock:
            for read in self._left:
                with contextlib.suppress(Exception):
                    self._require_agent().release_xfer_handle(read.handle)
                read.handle = None
            self._agent = None
            self._left = []

    def _begin(self, url: str, metadata: str, address: int, nbytes: int) -> _Read:
        self._left = [each for each in self._left if not self._has_ended(each)]
        waiting = sum(len(each.buffer) for each in self._left)
        if waiting > _MOST_LEFT:
            raise ConnectionError(f"NIXL: {waiting} bytes of reads that were given up have not come yet")
        agent = self._require_agent()
        buffer = np.empty(nbytes, np.uint8)
        own = buffer.ctypes.data
        try:
            peer = self._connect(url, base64.b64decode(metadata, validate=True))
            read = _Read(peer, buffer, agent.register_memory([(own, nbytes, 0, "")], "DRAM"))
        except ConnectionError:
            raise
        except Exception as error:  # what NIXL raises has no base of its own
            raise _failed(error) from error
        peer.reads += 1
        try:
            into, place = (agent.get_xfer_descs([(at, nbytes, 0)], "DRAM") for at in (own, address))
            read.handle = agent.initialize_xfer("READ", into, place, peer.name)
            agent.transfer(read.handle)
        except Exception as error:
            peer.failed = True
            self._end(read)
            raise _failed(error) from error
        return read

    def _connect(self, url: str, metadata: bytes) -> _Peer:
        """A server that was started again has other metadata; one whose connection failed gets another."""
        agent, peer = self._require_agent(), self._peers.get(url)
        if peer is not None:
            if peer.metadata == metadata and not peer.failed:
                return peer
            if peer.reads:
                raise ConnectionError(f"NIXL: {peer.reads} earlier reads have not ended yet")
            del self._peers[url]
            with contextlib.suppress(Exception):  # a failed one may be gone already
                agent.remove_remote_agent(peer.name)
        peer = self._peers[url] = _Peer(metadata, agent.add_remote_agent(metadata))
        return peer

    def _has_come(self, read: _Read) -> bool:
        """False: not yet. Raises ConnectionError where it never will."""
        error: Exception | None = None
        try:
            state = self._require_agent().check_xfer_state(read.handle)
        except Exception as raised:  # what NIXL raises has no base of its own
            state, error = "ERR", raised
        if state == "PROC":
            return False
        self._end(read)
        if state != "DONE":
            read.peer.failed = True
            raise _failed(error)
        return True

    def _has_ended(self, read: _Read) -> bool:
        try:
            return self._has_come(read)
        except ConnectionError:
            return True

    def _end(self, read: _Read) -> None:
        read.peer.reads -= 1
        agent = self._require_agent()
        with contextlib.suppress(Exception):
            if read.handle is not None:
                agent.release_xfer_handle(read.handle)
        with contextlib.suppress(Exception):
            agent.deregister_memory(read.registered)

    def _require_agent(self) -> _Agent:
        if self._agent is None:
            raise ConnectionError("NIXL: the server ends")
        return self._agent


def _failed(error: Exception | None) -> ConnectionError:
    return ConnectionError(f"NIXL: {error or 'the read has failed'}")


def _unusable(reason: str) -> UsageError:
    return UsageError(
        "--kv_transport nixl: NIXL cannot run here",
        got=reason,
        hint="leave --kv_transport out: blocks then travel through shared memory or over HTTP",
    )
