"""Memory of a launch: bounds, alignment and races of every access."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.plugins.cuda.ptx.races import Accesses, AccessesOfWarps, Bools, Ints, Threads

Values = npt.NDArray[Any]

SHARED_WINDOW = 1 << 56  # generic addresses from here on are shared memory
_GRANULE = 2  # bytes that are looked at together: no access is smaller


class KernelError(Exception):
    """What a kernel did that it must not do."""


class Region:
    """One allocation, or the shared memory of all blocks, one after the other.

    fresh: nobody has written anything yet, and reading what nobody wrote is a fault
    warps: of a block, where some of them wait for some others, else 0
    """

    def __init__(self, name: str, data: npt.NDArray[np.uint8], *, fresh: bool = False, warps: int = 0) -> None:
        self.name, self.data = name, data
        count = -(-len(data) // _GRANULE)
        self._writes = Accesses(count)
        self._reads = AccessesOfWarps(count, warps) if warps else Accesses(count)
        self._atomic, self._copied = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self._known = np.zeros(count, np.bool_) if fresh else None
        # The matrix units of warpgroups see what a thread wrote behind its next fence: who wrote, after how many.
        self._writer, self._after = np.zeros(count if fresh else 0, np.int64), np.full(count if fresh else 0, -1)
        self._fences = np.zeros(1, np.int64)

    def load(self, offsets: Ints, kind: np.dtype[Any], who: Threads) -> Values:
        """The values there."""
        self.note_read(offsets, kind.itemsize, who)
        return self.view(kind)[offsets // kind.itemsize]

    def store(self, offsets: Ints, values: Values, who: Threads) -> None:
        """One value per thread."""
        self.note_write(offsets, values.dtype.itemsize, who)
        self.view(values.dtype)[offsets // values.dtype.itemsize] = values

    def view(self, kind: np.dtype[Any]) -> Values:
        """All of it, as values."""
        return self.data[: len(self.data) // kind.itemsize * kind.itemsize].view(kind)

    def note_read(self, offsets: Ints, width: int, who: Threads) -> None:
        """Raises KernelError."""
        at, who = _granules(offsets, width, who)
        self._refuse(self._copied[at], "reads what is still being copied", at, who)
        if self._known is not None:
            self._refuse(~self._known[at], "reads what nobody wrote", at, who)
        self._refuse(self._writes.unordered(at, who), "a race: reads what another thread writes", at, who)
        self._reads.add(at, who)

    def note_units_read(self, offsets: Ints, width: int, who: Threads) -> None:
        """The same by the matrix units of warpgroups. Raises KernelError."""
        self.note_read(offsets, width, who)
        at, who = _granules(offsets, width, who)
        hidden = self._fences_of(self._writer[at]) <= self._after[at]
        if who.happened is not None:  # or behind a fence of who multiplies
            hidden &= ~who.happened.is_shown(who.number, self._writer[at], self._writes.times(at))
        self._refuse(hidden, "multiplies what no fence.proxy.async has shown", at, who)

    def show(self, who: Threads) -> None:
        """fence.proxy.async: the matrix units see what these threads have written."""
        self._fences_of(who.number)
        self._fences[who.number] += 1
        if who.happened is not None:
            who.happened.show(who.number)

    def _fences_of(self, number: Ints) -> Ints:
        if len(number) and (most := int(number.max())) >= len(self._fences):
            self._fences = np.concatenate([self._fences, np.zeros(most + 1, np.int64)])
        return self._fences[number]

    def note_write(self, offsets: Ints, width: int, who: Threads, *, copy: bool = False) -> None:
        """Raises KernelError. copy: it begins now, and ends any time until `end_copy`."""
        at, who = _granules(offsets, width, who)
        self._refuse(self._copied[at], "writes to what is still being copied", at, who)
        self._refuse(self._writes.unordered(at, who), "a race: writes what another thread writes", at, who)
        self._refuse(self._reads.unordered(at, who), "a race: writes what another thread reads", at, who)
        self._refuse(self._writes.replace(at, who), "a race: two threads write at once", at, who)
        self._wrote(at, who, atomic=False)
        if copy:
            self._copied[at] = True

    def note_atomic(self, offsets: Ints, width: int, who: Threads) -> None:
        """Raises KernelError."""
        at, who = _granules(offsets, width, who)
        self._refuse(self._copied[at], "changes what is still being copied", at, who)
        plain = ~self._atomic[at] & self._writes.unordered(at, who)
        self._refuse(plain, "a race: changes what another thread writes", at, who)
        self._refuse(self._reads.unordered(at, who), "a race: changes what another thread reads", at, who)
        self._writes.add(at, who)
        self._wrote(at, who, atomic=True)

    def end_copy(self, offsets: Ints, values: npt.NDArray[np.uint8], who: Threads) -> None:
        """The bytes of each thread arrive: uint8 [threads, 16 or 4]."""
        width = values.shape[1]
        at, repeated = _granules(offsets, width, who)
        self._copied[at] = False
        self._writes.replace(at, repeated)
        self._note_hidden(at, repeated)
        self.data.reshape(-1, width)[offsets // width] = values

    def _wrote(self, at: Ints, who: Threads, *, atomic: bool) -> None:
        self._atomic[at] = atomic
        self._note_hidden(at, who)
        if self._known is not None:
            self._known[at] = True

    def _note_hidden(self, at: Ints, who: Threads) -> None:
        if self._known is not None:
            self._writer[at], self._after[at] = who.number, self._fences_of(who.number)

    def _refuse(self, wrong: Bools, what: str, at: Ints, who: Threads) -> None:
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            block, thread = divmod(int(who.number[first]) - 1, who.per_block)
            raise KernelError(f"{what}: byte {at[first] * _GRANULE} of {self.name}, thread {thread} of block {block}")


def _granules(offsets: Ints, width: int, who: Threads) -> tuple[Ints, Threads]:
    per = max(1, width // _GRANULE)
    first = offsets // _GRANULE
    if per == 1:
        return first, who
    return (first[:, None] + np.arange(per)).reshape(-1), who.pick(np.repeat(np.arange(len(first)), per))


class Allocations:
    """What lies in global memory."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def add(self, address: int, data: npt.NDArray[np.uint8]) -> None:
        """In the place of what lay there before."""
        end = address + len(data)
        gone = [base for base, region in self._regions.items() if base < end and address < base + len(region.data)]
        for base in gone:
            del self._regions[base]
        self._regions[address] = Region(f"{len(data)} bytes of global memory", data)

    def find(self, addresses: Values, width: int) -> Iterator[tuple[Any, Region, Ints]]:
        """(which addresses, their region, offsets in it). Raises KernelError for what lies outside."""
        bases = np.array(sorted(self._regions), np.uint64)
        number = np.searchsorted(bases, addresses, side="right") - 1
        for each in np.unique(number).tolist():
            which = slice(None) if len(number) and (number == each).all() else np.flatnonzero(number == each)
            here = addresses[which]
            if each < 0:
                raise KernelError(f"an address outside all memory: {int(here[0]):#x}")
            base = int(bases[each])
            region = self._regions[base]
            offsets = (here - np.uint64(base)).astype(np.int64)
            if (wrong := offsets + width > len(region.data)).any():
                raise KernelError(f"an address {int(offsets[wrong][0])} bytes into {region.name}")
            yield which, region, offsets
