"""Which accesses to memory no barrier orders.

Two accesses to the same bytes, of different threads and at least one of them a write, are a race unless one happens
before the other: in an earlier launch, before a barrier of the block that both pass, or, within a warp, before a
bar.warp.sync. Atomic operations do not race with each other. The clock of a block counts its barriers, that of a warp
its own; clocks go on from launch to launch. Where some warps of a block wait for some others, each instruction has a
time of its own instead, and `Happened` knows what comes before what.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.plugins.cuda.ptx.happened import Happened

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_ONE, _WARP, _BLOCK, _BLOCKS = range(4)  # whose accesses are noted: of one thread, of several of one warp, ...


@dataclasses.dataclass(frozen=True, slots=True)
class Threads:
    """Who accesses: numbers within the launch, from 1, and clocks. begin: clocks below it are of earlier launches."""

    number: Ints
    clock: Ints
    warp_clock: Ints
    per_block: int
    begin: int
    happened: Happened | None = None

    def pick(self, which: Any) -> "Threads":
        """Some of them, also several times."""
        some = self.number[which], self.clock[which], self.warp_clock[which]
        return Threads(*some, self.per_block, self.begin, self.happened)


class Accesses:
    """The last accesses of one kind to each of many places."""

    def __init__(self, places: int) -> None:
        self._number, self._clock, self._warp_clock = (np.zeros(places, np.int64) for _ in range(3))
        self._whose = np.zeros(places, np.int8)

    def unordered(self, at: Ints, who: Threads) -> Bools:
        """Whether an access of `who` to the places `at` could come before one that is noted."""
        clock = self._clock[at]
        recent = clock >= who.begin
        if not recent.any():
            return recent
        number, whose = self._number[at], self._whose[at]
        block = (number - 1) // who.per_block == (who.number - 1) // who.per_block
        warp = (number - 1) // 32 == (who.number - 1) // 32
        alone = (whose == _ONE) & (number == who.number)
        if who.happened is not None:
            other = np.maximum(number, 1)  # where nothing is noted
            one = (whose == _ONE) & who.happened.precedes(other, clock, who.number)
            ordered = one | alone | ((whose == _WARP) & who.happened.warp_precedes(other, clock, who.number))
            return np.asarray(recent & ~(block & ordered))
        within = warp & (whose <= _WARP) & (self._warp_clock[at] < who.warp_clock)
        ordered = block & (whose < _BLOCKS) & ((clock < who.clock) | alone | within)
        return np.asarray(recent & ~ordered)

    def times(self, at: Ints) -> Ints:
        """Of those that are noted."""
        return np.asarray(self._clock[at])

    def replace(self, at: Ints, who: Threads) -> Bools:
        """Note these alone; where that cannot be, since several have the same place."""
        self._number[at], self._clock[at], self._warp_clock[at] = who.number, who.clock, who.warp_clock
        self._whose[at] = _ONE
        return np.asarray(self._number[at] != who.number)

    def add(self, at: Ints, who: Threads) -> None:
        """Note these beside what is noted."""
        number, clock, whose = self._number[at], self._clock[at], self._whose[at]
        block = (number - 1) // who.per_block == (who.number - 1) // who.per_block
        beside = clock == who.clock if who.happened is None else self.unordered(at, who)
        joined = np.where(beside, np.maximum(whose, _spread(number, who)), _ONE)
        joined = np.where(block & (whose < _BLOCKS), joined, _BLOCKS)
        joined = np.where(clock >= who.begin, joined, _ONE)
        if self.replace(at, who).any():  # several of them at one place
            joined = np.maximum(joined, _spread(self._number[at], who))
            self._whose[at] = _ONE
            np.maximum.at(self._whose, at, joined.astype(np.int8))
        else:
            self._whose[at] = joined


class AccessesOfWarps:
    """The same, those of each warp of a block for itself: what several have done at one place is not known of one."""

    def __init__(self, places: int, warps: int) -> None:
        self._places, self._of = places, list[Accesses | None]([None] * warps)

    def unordered(self, at: Ints, who: Threads) -> Bools:
        """As above."""
        found = np.zeros(len(at), np.bool_)
        for each in self._of:
            if each is not None:
                found |= each.unordered(at, who)
        return found

    def add(self, at: Ints, who: Threads) -> None:
        """As above."""
        warp = (who.number - 1) // 32 % len(self._of)
        for each in np.unique(warp).tolist():
            which = np.flatnonzero(warp == each)
            noted = self._of[each]
            if noted is None:
                noted = self._of[each] = Accesses(self._places)
            noted.add(at[which], who.pick(which))


def _spread(number: Ints, who: Threads) -> Ints:
    """What one more thread and these make."""
    warp = (number - 1) // 32 == (who.number - 1) // 32
    block = (number - 1) // who.per_block == (who.number - 1) // who.per_block
    return np.where(number == who.number, _ONE, np.where(warp, _WARP, np.where(block, _BLOCK, _BLOCKS)))
