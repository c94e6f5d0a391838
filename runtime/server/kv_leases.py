"""Computed blocks that wait to be fetched: each lease has memory of its own, so the cache keeps nothing for it.

    open ──▶ lease: an id, bytes ──▶ fetched, over shared memory or HTTP ──▶ release; or its time is over

The memory has no name (memfd): it is gone when the last process that maps it lets go, however that process ends. At its
beginning stands the id of the lease, so that another process can tell whether it has opened what it was promised.
"""

import asyncio
import mmap
import os
import re
import secrets

import numpy as np

from ingot.runtime.kv_transfer import Bytes
from ingot.runtime.server.api_error import ApiError

_PATH = re.compile("/proc/[0-9]+/fd/[0-9]+")
HEAD = 64  # bytes before those of the blocks: the id


class Lease:
    """path: of the memory, for other processes of this machine. data: uint8, the blocks' bytes."""

    def __init__(self, lease_id: str, nbytes: int) -> None:
        """Raises OSError where the system has no memory or no file for it."""
        self.lease_id, self.nbytes = lease_id, nbytes
        self._file = os.memfd_create("ingot kv", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        try:
            os.truncate(self._file, HEAD + nbytes)
            whole = np.frombuffer(mmap.mmap(self._file, HEAD + nbytes), np.uint8)
        except BaseException:
            os.close(self._file)
            raise
        whole[: len(lease_id)] = np.frombuffer(lease_id.encode(), np.uint8)
        self.data: Bytes = whole[HEAD:]
        self.expiry: asyncio.TimerHandle | None = None
        self.released = False

    def release(self) -> None:
        """Give the memory back, as soon as nobody reads it."""
        if not self.released:
            self.released = True
            self.data = np.empty(0, np.uint8)
            os.close(self._file)
            if self.expiry is not None:
                self.expiry.cancel()


class Leases:
    """Those of one server, for its event loop. generation: another word whenever the server is started.

    most_bytes  of all leases together
    seconds     after which one expires that nobody has released
    """

    def __init__(self, *, most_bytes: int, seconds: float) -> None:
        self.generation = secrets.token_hex(8)
        self.seconds, self._most_bytes = seconds, most_bytes
        self._open: dict[str, Lease] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(lease.nbytes for lease in tuple(self._open.values()))

    def open(self, nbytes: int) -> Lease:
        """Memory for so many bytes. Raises ApiError 503 where there is no room."""
        if self.nbytes + nbytes > self._most_bytes:
            raise _no_room(f"{self.nbytes} of {self._most_bytes} bytes of --lease_memory are in use, {nbytes} more")
        lease_id = f"{self.generation}-{secrets.token_hex(16)}"
        try:
            lease = self._open[lease_id] = Lease(lease_id, nbytes)
        except OSError as error:
            raise _no_room(str(error)) from None
        lease.expiry = asyncio.get_running_loop().call_later(self.seconds, self.release, lease_id)
        return lease

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


def map_lease(path: str, lease_id: str, nbytes: int) -> Bytes | None:
    """The bytes of a lease of another process; None where they cannot be reached from this one."""
    if not _PATH.fullmatch(path):
        return None
    try:
        with open(path, "rb") as file:
            whole = np.frombuffer(mmap.mmap(file.fileno(), HEAD + nbytes, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):
        return None
    if whole[: len(lease_id)].tobytes() != lease_id.encode():
        return None
    return whole[HEAD:]


def _no_room(reason: str) -> ApiError:
    return ApiError(
        503,
        f"there is no memory for the blocks: {reason}",
        kind="service_unavailable",
        code="lease_memory_full",
        headers={"retry-after": "1"},
    )
