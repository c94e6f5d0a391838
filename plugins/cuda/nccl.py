"""NCCL, called by its C interface: how the GPUs of an engine's ranks exchange numbers.

NCCL only moves numbers. It adds none: the order in which its own sums add depends on how many ranks there are, so a
kernel of ingot adds (`kernels/ranks.cu`). Its calls enqueue work on a stream, also while that is captured.

Communicators are made in the blocking way: those of the other way start a thread for each call. A call that waits for
another rank gives up where another thread calls `abort`.
"""

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator
from typing import Any

from ingot.errors import TargetError, install
from ingot.plugins.cuda.wheels import in_wheels

INSTALL = install("nccl")
OLDEST = (2, 18)  # earlier ones were not tried
ID_BYTES = 128

_NAMES = ("libnccl.so.2",)
_IN_WHEELS = ("nccl/lib",)
_FLOAT32 = 7  # ncclDataType_t
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t

Library = ctypes.CDLL


class _UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Nccl:
    """The library and its version."""

    library: Library
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return "NCCL " + ".".join(map(str, self.version))

    def call(self, name: str, *arguments: object) -> None:
        """Raises TargetError where the library says no."""
        status = getattr(self.library, name)(*arguments)
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise TargetError("NCCL reports an error", where=name, got=self.words(status))

    def words(self, status: int) -> str:
        """What a status means, as the library says it."""
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        said: bytes | None = self.library.ncclGetErrorString(status)
        return (said or b"").decode(errors="replace") or f"status {status}"

    def new_id(self) -> bytes:
        """Names a communicator that is to be made; one rank asks for it, and tells the others."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


def find_nccl() -> Nccl | str:
    """The library, or what to install."""
    for name in (*_NAMES, *in_wheels(_NAMES, _IN_WHEELS)):
        with contextlib.suppress(OSError):
            return _checked(ctypes.CDLL(name))
    return f"NCCL is not here; {INSTALL}"


def _checked(library: Library) -> Nccl | str:
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    # 2.8 and older: 2803 for 2.8.3
    major, rest = divmod(number.value, 10000 if number.value >= 10000 else 1000)
    found = Nccl(library=library, version=(major, *divmod(rest, 100)))
    if found.version < OLDEST:
        return f"{found} is too old, expected {'.'.join(map(str, OLDEST))} or newer; {INSTALL}"
    return found


def require_nccl() -> Nccl:
    """Raises TargetError where there is none."""
    found = find_nccl()
    if isinstance(found, str):
        raise TargetError("this machine has no NCCL, which an engine of several ranks needs", got=found, hint=INSTALL)
    return found


class Communicator:
    """Ranks that exchange numbers. All of them make the same calls in the same order.

    Every call is asynchronous, in the order of `stream`. Addresses are of device memory; counts of float32 numbers.
    """

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, count: int, stream: int) -> None:
        """Waits for the other ranks. The context of this rank's GPU is current. Raises TargetError."""
        self.rank, self.count = rank, count
        self._nccl, self._stream = nccl, ctypes.c_void_p(stream)
        self._handle: ctypes.c_void_p | None = None
        handle, given = ctypes.c_void_p(), _UniqueId.from_buffer_copy(unique_id)
        nccl.call("ncclCommInitRank", ctypes.byref(handle), count, given, rank)
        self._handle = handle

    def all_gather(self, to: int, source: int, count: int) -> None:
        """What every rank has, in their order: to [ranks, count], source [count]."""
        self._call("ncclAllGather", _pointer(source), _pointer(to), ctypes.c_size_t(count), _FLOAT32)

    def send(self, source: int, count: int, to: int) -> None:
        """To a rank, which receives as many."""
        self._call("ncclSend", _pointer(source), ctypes.c_size_t(count), _FLOAT32, to)

    def receive(self, to: int, count: int, source: int) -> None:
        """From a rank, which sends as many."""
        self._call("ncclRecv", _pointer(to), ctypes.c_size_t(count), _FLOAT32, source)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is sent and received inside is one operation, so its order does not matter."""
        self._nccl.call("ncclGroupStart")
        try:
            yield
        finally:
            self._nccl.call("ncclGroupEnd")

    def require_well(self) -> None:
        """Raises TargetError where NCCL has found an error since: a rank that is gone, a network that fails."""
        if self._handle is None:
            return
        error = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(error))
        if error.value not in (_SUCCESS, _IN_PROGRESS):
            raise TargetError("NCCL reports an error", got=self._nccl.words(error.value))

    def abort(self) -> None:
        """End what is under way, whatever the others do. From any thread; nothing can be called afterwards. Returns
        once the graphs that hold calls are destroyed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._nccl.call("ncclCommAbort", handle)

    def close(self) -> None:
        """Once all ranks have done their work, and graphs that hold calls are destroyed: it waits for both."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._nccl.call("ncclCommDestroy", handle)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._handle is None:
            raise TargetError("the communicator of the ranks was ended", where=name)
        self._nccl.call(name, *arguments, self._handle, self._stream)


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)
