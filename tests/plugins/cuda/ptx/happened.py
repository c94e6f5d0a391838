"""What happens before what, where warps of a block wait for each other by signals and not all at one barrier.

Each instruction has a time. Of each thread it is known up to which time the accesses of every other thread of its block
come before what it does next: it learns this where it meets others, or waits for a signal that they have given.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Happened:
    """Of the threads of some whole blocks. now: the time; begin: that of the launch."""

    def __init__(self, count: int, per_block: int, begin: int, first: int) -> None:
        """first: the lowest of the threads' numbers within the launch."""
        self.now = begin
        self._first, self._per_block = first, per_block
        self._seen = np.full((count, per_block), begin - 1, np.int64)
        self._shown = self._seen.copy()

    def given(self, lanes: Ints) -> Ints:
        """What who waits for these threads, as they are now, learns: [threads of a block]. All are of one block."""
        known = self._seen[lanes]
        known[np.arange(len(lanes)), lanes % self._per_block] = self.now
        return np.asarray(known.max(0))

    def learn(self, lanes: Ints, given: Ints) -> None:
        """These threads have waited for that."""
        self._seen[lanes] = np.maximum(self._seen[lanes], given)

    def meet(self, lanes: Ints) -> None:
        """Threads of whole warps, each with its own warp."""
        for warp in lanes.reshape(-1, 32):
            self.learn(warp, self.given(warp))

    def show(self, number: Ints) -> None:
        """The matrix units see all that comes before these threads (fence.proxy.async)."""
        lanes = number - self._first
        self._shown[lanes] = self._seen[lanes]

    def is_shown(self, reader: Ints, writer: Ints, time: Ints) -> Bools:
        """Whether the matrix units see, for one thread each, what another thread did at a time."""
        return np.asarray(self._shown[reader - self._first, (writer - 1) % self._per_block] >= time)

    def precedes(self, number: Ints, time: Ints, then: Ints) -> Bools:
        """Whether what one thread did at a time comes before what another thread of its block does now."""
        return np.asarray(self._seen[then - self._first, (number - 1) % self._per_block] >= time)

    def warp_precedes(self, number: Ints, time: Ints, then: Ints) -> Bools:
        """The same of all threads of the first one's warp."""
        known = self._seen.reshape(len(self._seen), -1, 32)
        return np.asarray(known[then - self._first, (number - 1) % self._per_block // 32].min(1) >= time)
