"""Computed blocks that wait to be fetched: each lease has memory of its own, so the cache keeps nothing for it.

    open ──▶ lease: an id, bytes ──▶ fetched, over shared memory, HTTP or NIXL ──▶ release; or its time is over

The memory has no name (memfd): it is gone when the last process that maps it lets go, however that process ends. What
is fetched by NIXL lies in an arena, whose pieces are used again. At the beginning stands the id of the lease, so that
another process can tell whether it has what it was promised.
"""

import asyncio
import mmap
import os
import re
import secrets
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ingot.runtime.kv_transfer import Bytes
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.nixl_blocks import Arena

_PATH = re.compile("/proc/[0-9]+/fd/[0-9]+")
HEAD = 64  # bytes before those of the blocks: the id


class _Memory(Protocol):
    """whole: uint8, the head and the blocks. place: what an offer says of it, for those who fetch it."""

    whole: Bytes

    @property
    def place(self) -> Mapping[str, object]: ...

    def free(self) -> None: ...


class _File:
    """Memory without a name, which other processes of this machine map by its path."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("ingot kv", os.MFD_CLOEXEC)
        self.place = {"path": f"/proc/{os.getpid()}/fd/{self._file}"}
        try:
            os.truncate(self._file, nbytes)
            self.whole: Bytes = np.frombuffer(mmap.mmap(self._file, nbytes), np.uint8)
        except BaseException:
            os.close(self._file)
            raise

    def free(self) -> None:
        """As soon as nobody reads it."""
        self.whole = np.empty(0, np.uint8)
        os.close(self._file)


class Lease:
    """place: where other servers find it. data: uint8, the blocks' bytes."""

    def __init__(self, lease_id: str, nbytes: int, memory: _Memory) -> None:
        self.lease_id, self.nbytes, self._memory = lease_id, nbytes, memory
        self.place = memory.place
        memory.whole[: len(lease_id)] = np.frombuffer(lease_id.encode(), np.uint8)
        self.data: Bytes = memory.whole[HEAD:]
        self.expiry: asyncio.TimerHandle | None = None
        self.released = False

    def release(self) -> None:
        """Give the memory back, as soon as nobody reads it."""
        if not self.released:
            self.released = True
            self.data = np.empty(0, np.uint8)
            self._memory.free()
            if self.expiry is not None:
                self.expiry.cancel()


class Leases:
    """Those of one server, for its event loop. generation: another word whenever the server is started.

    most_bytes  of all leases together
    seconds     after which one expires that nobody has released
    arena       for those that are fetched by NIXL
    """

    def __init__(self, *, most_bytes: int, seconds: float, arena: Arena | None = None) -> None:
        self.generation, self._arena = secrets.token_hex(8), arena
        self.seconds, self._most_bytes = seconds, most_bytes
        self._open: dict[str, Lease] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(lease.nbytes for lease in tuple(self._open.values()))

    def open(self, nbytes: int, transport: str) -> Lease:
        """Memory for so many bytes. Raises ApiError 503 where there is no room. transport: one that `require` knows."""
        if self.nbytes + nbytes > self._most_bytes:
            raise _no_room(f"{self.nbytes} of {self._most_bytes} bytes of --lease_memory are in use, {nbytes} more")
        lease_id = f"{self.generation}-{secrets.token_hex(16)}"
        try:
            memory = self._arena.take(HEAD + nbytes) if self._arena and transport == "nixl" else _File(HEAD + nbytes)
            lease = self._open[lease_id] = Lease(lease_id, nbytes, memory)
        except OSError as error:
            raise _no_room(str(error)) from None
        lease.expiry = asyncio.get_running_loop().call_later(self.seconds, self.release, lease_id)
        return lease

    def require(self, transport: str) -> None:
        """Raises ApiError where this server has no such transport."""
        if transport == "nixl" and self._arena is None:
            raise ApiError(
                409,
                "the decode server fetches blocks by NIXL, and this server has none; start both with --kv_transport "
                "nixl, or neither",
                code="transport_mismatch",
            )

    def find(self, lease_id: str) -> Lease:
        """Raises ApiError 404."""
        lease = self._open.get(lease_id)
        if lease is not None:
            return lease
        generation = lease_id.partition("-")[0]
        why = (
            "it has expired or was released"
            if generation == self.generation
            else "the server has been started again since"
        )
        raise ApiError(404, f"there is no lease {lease_id[:100]!r}: {why}", code="lease_not_found")

    def release(self, lease_id: str) -> bool:
        """Whether there was such a lease."""
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            lease.release()
        return lease is not None

    def close(self) -> None:
        """Release all."""
        for lease_id in tuple(self._open):
            self.release(lease_id)
        if self._arena is not None:
            self._arena.close()


def map_lease(path: str, lease_id: str, nbytes: int) -> Bytes | None:
    """The bytes of a lease of another process; None where they cannot be reached from this one."""
    if not _PATH.fullmatch(path):
        return None
    try:
        with open(path, "rb") as file:
            whole = np.frombuffer(mmap.mmap(file.fileno(), HEAD + nbytes, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):
        return None
    return blocks_of(whole, lease_id)


def blocks_of(whole: Bytes, lease_id: str) -> Bytes | None:
    """The bytes behind the head; None where the head is that of another lease."""
    return whole[HEAD:] if whole[: len(lease_id)].tobytes() == lease_id.encode() else None


def _no_room(reason: str) -> ApiError:
    return ApiError(
        503,
        f"there is no memory for the blocks: {reason}",
        kind="service_unavailable",
        code="lease_memory_full",
        headers={"retry-after": "1"},
    )
