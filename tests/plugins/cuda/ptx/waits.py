"""Where threads of a block wait for others: barriers of all or of some of them, and signals (mbarrier)."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.operands import Lanes
from tests.plugins.cuda.ptx.parse import Instruction, Kernel
from tests.plugins.cuda.ptx.races import Threads

if TYPE_CHECKING:
    from tests.plugins.cuda.ptx.machine import _Run

Copies = list[tuple[Threads, Lanes, npt.NDArray[np.uint8]]]  # who copies, to which offsets, what


@dataclasses.dataclass(slots=True)
class _Signal:
    """count: arrivals that give it once; left: of them; times: that it was given. made: by which thread, and when.
    learnt, coming: what who waits learns from those who gave it last, and from those who have arrived since."""

    count: int
    made: tuple[int, int]
    left: int
    times: int = 0
    learnt: Any = None
    coming: Any = None
    copies: Copies = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Barrier:
    """count: threads that it takes, 0 for all that have not ended. parked: (where, who); passed: those that only say
    that they have been there. learnt: by block."""

    count: int
    parked: list[tuple[int, Lanes]] = dataclasses.field(default_factory=list)
    passed: list[Lanes] = dataclasses.field(default_factory=list)
    learnt: dict[int, Any] = dataclasses.field(default_factory=dict)


def parts_blocks(kernel: Kernel, threads: int) -> bool:
    """Whether some warps of a block wait for some others."""
    return any(
        each.op[0] == "mbarrier"
        or (each.op[0] in ("bar", "barrier") and ("arrive" in each.op or _count(each) not in (0, threads)))
        for each in kernel.instructions
    )


def _count(each: Instruction) -> int:
    return int(each.operands[1]) if "warp" not in each.op and len(each.operands) > 1 else 0


class Waits:
    """Those of one run."""

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._alive = np.full(len(run.clocks), run.threads)
        self._barriers: dict[int, _Barrier] = {}
        self._signals: dict[tuple[int, int], _Signal] = {}
        self._waiting: list[tuple[int, Lanes, Lanes, Lanes]] = []  # where, who, for which signals, with which parity
        self._tried: dict[int, npt.NDArray[np.bool_]] = {}  # at each mbarrier.try_wait: who has

    def parked(self) -> list[int]:
        """Instructions at which threads wait."""
        at = [at for barrier in self._barriers.values() for at, _ in barrier.parked]
        return sorted([*at, *(at for at, *_ in self._waiting)])

    def end(self, lanes: Lanes) -> None:
        """These threads have ended."""
        self._alive -= np.bincount(self._run.block[lanes], minlength=len(self._alive))
        self._release()

    # Barriers.

    def meet(self, at: int, each: Instruction, lanes: Lanes, number: int) -> None:
        """At a barrier of the block. Raises KernelError."""
        self._run.require_warps(lanes)
        count, stays = _count(each), "arrive" not in each.op
        # those with a number other than 0 are the same wherever they stand
        key = -number if number else at
        barrier = self._barriers.setdefault(key, _Barrier(count))
        if barrier.count != count:
            raise KernelError(f"barrier {number} takes {barrier.count} threads elsewhere")
        if count in (0, self._run.threads):
            self._refuse_others(key, lanes)
        if stays:
            barrier.parked.append((at, lanes))
        else:
            barrier.passed.append(lanes)
        if self._run.happened is not None:
            for block, some in self._by_block(lanes):
                given = self._run.happened.given(some)
                barrier.learnt[block] = np.maximum(barrier.learnt.get(block, given), given)
        self._release()

    def _refuse_others(self, key: int, lanes: Lanes) -> None:
        whole = (0, self._run.threads)
        others = [barrier for other, barrier in self._barriers.items() if other != key and barrier.count in whole]
        for barrier in others:
            for _, each in barrier.parked:
                if np.isin(self._run.block[lanes], self._run.block[each]).any():
                    raise KernelError("threads of a block wait at different barriers")

    def _by_block(self, lanes: Lanes) -> list[tuple[int, Lanes]]:
        block = self._run.block[lanes]
        return [(each, lanes[block == each]) for each in np.unique(block).tolist()]

    def _release(self) -> None:
        for key, barrier in list(self._barriers.items()):
            if not barrier.parked and not barrier.passed:
                continue
            lanes = np.concatenate([*(each for _, each in barrier.parked), *barrier.passed])
            here = np.bincount(self._run.block[lanes], minlength=len(self._alive))
            expected = np.full(len(self._alive), barrier.count) if barrier.count else self._alive
            if barrier.count and (here > expected).any():
                raise KernelError(f"more threads come to barrier {-key} than the {barrier.count} that it takes")
            full = (here == expected) & (here > 0)
            if full.any():
                self._free(barrier, full)

    def _free(self, barrier: _Barrier, full: npt.NDArray[np.bool_]) -> None:
        run, waiting = self._run, barrier.parked
        run.clocks[full] += 1
        run.latest = max(run.latest, int(run.clocks.max()))
        left = [(at, each[~full[run.block[each]]]) for at, each in waiting]
        barrier.parked = [(at, each) for at, each in left if len(each)]
        barrier.passed = [rest for each in barrier.passed if len(rest := each[~full[run.block[each]]])]
        learnt = {
            block: barrier.learnt.pop(block) for block in np.flatnonzero(full).tolist() if block in barrier.learnt
        }
        for at, each in waiting:
            freed = each[full[run.block[each]]]
            if not len(freed):
                continue
            if run.happened is not None:
                for block, some in self._by_block(freed):
                    run.happened.learn(some, learnt[block])
            run.put(at + 1, np.sort(freed))

    # Signals.

    def make(self, lanes: Lanes, places: Lanes, counts: Lanes) -> None:
        """mbarrier.init: of each thread one signal, at a place in shared memory, which so many arrivals give."""
        assert self._run.happened is not None
        now = self._run.happened.now
        for lane, place, count in zip(lanes.tolist(), places.tolist(), counts.tolist(), strict=True):
            key = int(self._run.block[lane]), place
            self._signals[key] = _Signal(count, (int(self._run.number[lane]), now), count)

    def arrive(self, lanes: Lanes, places: Lanes, copies: Copies) -> None:
        """Each thread at one signal; behind copies that the threads have begun, if there are any."""
        assert self._run.happened is not None
        for key, some in self._by_signal(lanes, places):
            signal = self._signal(key, some)
            if len(some) > signal.left:
                raise KernelError(f"{len(some)} threads arrive at a signal that takes {signal.left} more")
            given = self._run.happened.given(some)
            signal.coming = given if signal.coming is None else np.maximum(signal.coming, given)
            for who, offsets, data in copies:
                which = np.isin(who.number, self._run.number[some])
                signal.copies.append((who.pick(which), offsets[which], data[which]))
            signal.left -= len(some)
            if signal.left == 0:
                self._give(signal)

    def _give(self, signal: _Signal) -> None:
        for who, offsets, data in signal.copies:
            self._run.shared.end_copy(offsets, data, who)
        signal.copies, signal.left, signal.times = [], signal.count, signal.times + 1
        signal.learnt, signal.coming = signal.coming, None
        waiting, self._waiting = self._waiting, []
        for at, lanes, places, parity in waiting:
            self._wait(at, lanes, places, parity)

    def try_wait(self, at: int, lanes: Lanes, places: Lanes, parity: Lanes) -> None:
        """mbarrier.try_wait of each thread, for a signal that is given the n-th time (from 0) with n % 2 = parity. The
        first time it ends in vain, as it may any time: a kernel has to try again."""
        tried = self._tried.setdefault(at, np.zeros(self._run.count, np.bool_))
        old = tried[lanes]
        tried[lanes] = True
        if not old.all():
            self._run.pass_wait(at, lanes[~old], given=False)
        if old.any():
            self._wait(at, lanes[old], places[old], parity[old])

    def _wait(self, at: int, lanes: Lanes, places: Lanes, parity: Lanes) -> None:
        assert self._run.happened is not None
        ready = np.zeros(len(lanes), np.bool_)
        for key, some in self._by_signal(lanes, places):
            signal, which = self._signal(key, some), np.isin(lanes, some)
            over = which & (parity != signal.times % 2)
            ready |= over
            if over.any() and signal.learnt is not None:
                self._run.happened.learn(lanes[over], signal.learnt)
        if not ready.all():
            self._waiting.append((at, lanes[~ready], places[~ready], parity[~ready]))
        if ready.any():
            self._run.pass_wait(at, lanes[ready], given=True)

    def _by_signal(self, lanes: Lanes, places: Lanes) -> list[tuple[tuple[int, int], Lanes]]:
        found = []
        for block, some in self._by_block(lanes):
            here = places[self._run.block[lanes] == block]
            found += [((block, place), some[here == place]) for place in np.unique(here).tolist()]
        return found

    def _signal(self, key: tuple[int, int], lanes: Lanes) -> _Signal:
        signal = self._signals.get(key)
        if signal is None:
            raise KernelError("a signal that nobody has made")
        number, time = (np.full(len(lanes), each) for each in signal.made)
        mine = self._run.number[lanes]
        assert self._run.happened is not None
        if not ((number == mine) | self._run.happened.precedes(number, time, mine)).all():
            raise KernelError("a race: uses a signal while another thread makes it")
        return signal
