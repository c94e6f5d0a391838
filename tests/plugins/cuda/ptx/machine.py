"""Runs a kernel: all threads of some blocks at once, those first that others may have to wait for.

Threads that part come together again where their ways meet. Barriers, warp instructions and memory are checked as a GPU
would have it at its strictest; what is wrong is a KernelError that names the instruction.
"""

import heapq
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.plugins.cuda.ptx.arithmetic import dtype_of
from tests.plugins.cuda.ptx.instructions import Instructions
from tests.plugins.cuda.ptx.memory import Allocations, KernelError, Region
from tests.plugins.cuda.ptx.order import ranks
from tests.plugins.cuda.ptx.parse import Instruction, Kernel
from tests.plugins.cuda.ptx.races import Threads

Lanes = npt.NDArray[np.int64]

_AT_ONCE = 1 << 15  # threads


class Machine:
    """Global memory, and a clock that goes on. lines: instructions that were issued, by their line of the source."""

    def __init__(self) -> None:
        self.memory = Allocations()
        self.lines: Counter[tuple[int, int]] = Counter()
        self._clock = self._latest = 1

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], threads: int, shared_bytes: int, parameters: bytes
    ) -> Counter[str]:
        """Instructions that warps issued, by name. Raises KernelError."""
        count, counted = grid[0] * grid[1] * grid[2], Counter[str]()
        step = max(1, _AT_ONCE // threads)
        for first in range(0, count, step):
            blocks = np.arange(first, min(count, first + step))
            run = _Run(self.memory, kernel, grid, threads, blocks, shared_bytes, parameters, self._clock)
            counted += run.run()
            for at, issued in run.issued.items():
                self.lines[kernel.instructions[at].line] += issued
            self._latest = max(self._latest, run.latest)
        self._clock = self._latest + 1
        return counted


class _Run:
    """Some blocks of a launch."""

    def __init__(
        self,
        memory: Allocations,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        blocks: Lanes,
        shared_bytes: int,
        parameters: bytes,
        clock: int,
    ) -> None:
        if threads % 32:
            raise KernelError(f"{kernel.name}: blocks of {threads} threads are no whole warps")
        self.kernel, self.memory, self.parameters = kernel, memory, parameters
        self.count, self.threads, self.begin = len(blocks) * threads, threads, clock
        self.block = np.repeat(np.arange(len(blocks)), threads)
        thread = np.tile(np.arange(threads), len(blocks))
        self.number = blocks[self.block] * threads + thread + 1
        self.clocks = np.full(len(blocks), clock, np.int64)
        self.warp_clocks = np.zeros(self.count // 32, np.int64)
        self.shared_bytes = -(-(kernel.static_bytes + shared_bytes) // 128) * 128
        self.used_bytes = kernel.static_bytes + shared_bytes
        self.shared = Region(
            f"shared memory ({self.shared_bytes} bytes a block)",
            np.full(max(16, self.shared_bytes * len(blocks)), 0xFF, np.uint8),
            fresh=True,
        )
        number = blocks[self.block]
        self.special = {
            "%tid.x": thread,
            "%ntid.x": np.full(self.count, threads),
            "%ctaid.x": number % grid[0],
            "%ctaid.y": number // grid[0] % grid[1],
            "%ctaid.z": number // grid[0] // grid[1],
            "%laneid": thread % 32,
            "%tid.y": np.zeros_like(thread),
            "%tid.z": np.zeros_like(thread),
        } | {f"%nctaid.{axis}": np.full(self.count, size) for axis, size in zip("xyz", grid, strict=True)}
        self.registers: dict[str, npt.NDArray[Any]] = {}
        self._alive = np.full(len(blocks), threads)
        self._parked: dict[int, list[tuple[int, Lanes]]] = {}  # at each barrier: where, and who
        self._groups: dict[int, Lanes] = {}
        self._ranks = ranks(kernel)
        self._order: list[tuple[int, int]] = []  # of groups: their rank, and where they are
        self._counted: Counter[str] = Counter()
        self.issued: Counter[int] = Counter()
        self._code = Instructions(self)
        self.latest = clock

    def register(self, name: str) -> npt.NDArray[Any]:
        """Of all threads. What nobody wrote is no usual number."""
        found = self.registers.get(name)
        if found is None:
            prefix = name.rstrip("0123456789")
            kind = dtype_of(self.kernel.registers[prefix].replace("f", "b"))
            found = self.registers[name] = np.full(self.count, 0xDEADBEEFDEADBEEF % 256**kind.itemsize).astype(kind)
        return found

    def who(self, lanes: Lanes) -> Threads:
        """These threads, now."""
        return Threads(
            self.number[lanes], self.clocks[self.block[lanes]], self.warp_clocks[lanes // 32], self.threads, self.begin
        )

    def require_warps(self, lanes: Lanes) -> None:
        """Raises KernelError unless all threads of each warp are together."""
        if len(lanes) % 32 or (lanes.reshape(-1, 32)[:, 0] % 32).any() or (np.diff(lanes.reshape(-1, 32)) != 1).any():
            raise KernelError("a warp whose threads are not together runs an instruction of whole warps")

    def run(self) -> Counter[str]:
        self._put(0, np.arange(self.count))
        with np.errstate(all="ignore"):
            while self._order:
                _, at = heapq.heappop(self._order)
                lanes = self._groups.pop(at, None)
                if lanes is not None:
                    self._advance(at, lanes)
        if self._parked:
            at = min(at for found in self._parked.values() for at, _ in found)
            raise KernelError(f"{self.kernel.name}: threads wait for ever at instruction {at}, {self._text(at)}")
        self._code.check_ended()
        return self._counted

    def _text(self, at: int) -> str:
        return self.kernel.instructions[at].text

    def _put(self, at: int, lanes: Lanes) -> None:
        before = self._groups.get(at)
        if before is None:
            self._groups[at] = lanes
            heapq.heappush(self._order, (self._ranks[at], at))
        else:
            self._groups[at] = np.sort(np.concatenate([before, lanes]))

    def _advance(self, at: int, lanes: Lanes) -> None:
        """Until others have to come first."""
        instructions, warps = self.kernel.instructions, len(np.unique(lanes // 32))
        stop = self._order[0][0] if self._order else len(instructions) + 1
        while True:
            if at >= len(instructions):
                return self._end(lanes)
            each = instructions[at]
            self._counted[each.op[0]] += warps
            self.issued[at] += warps
            taken = self._guarded(each, lanes)
            try:
                if each.op[0] == "bra":
                    return self._branch(at, lanes, taken, self.kernel.labels[each.operands[0]])
                if each.op[0] in ("ret", "exit"):
                    if len(taken) < len(lanes):
                        self._put(at + 1, np.setdiff1d(lanes, taken))
                    return self._end(taken)
                if each.op[0] in ("bar", "barrier") and "warp" not in each.op:
                    return self._wait(at, lanes, taken)
                if len(taken):
                    self._code.closure(at, each)(taken)
            except KernelError as fault:
                raise KernelError(f"{self.kernel.name}, instruction {at}, {each.text}: {fault}") from None
            at += 1
            if self._ranks[at] >= stop:
                return self._put(at, lanes)

    def _guarded(self, each: Instruction, lanes: Lanes) -> Lanes:
        if not each.guard:
            return lanes
        predicate = self.register(each.guard)[lanes]
        guarded: Lanes = lanes[~predicate if each.negated else predicate]
        return guarded

    def _branch(self, at: int, lanes: Lanes, taken: Lanes, target: int) -> None:
        if len(taken):
            self._put(target, taken)
        if len(taken) < len(lanes):
            self._put(at + 1, np.setdiff1d(lanes, taken, assume_unique=True))

    def _wait(self, at: int, lanes: Lanes, taken: Lanes) -> None:
        """At a barrier of the block."""
        if len(taken) < len(lanes):
            raise KernelError("a barrier under a predicate that is not the same in all threads")
        self.require_warps(lanes)
        barrier = self._barrier(at)
        elsewhere = [each for other, found in self._parked.items() if other != barrier for _, each in found]
        if any(np.isin(self.block[lanes], self.block[each]).any() for each in elsewhere):
            raise KernelError("threads of a block wait at different barriers")
        self._parked.setdefault(barrier, []).append((at, lanes))
        self._release()

    def _barrier(self, at: int) -> int:
        """Barriers with a number other than 0 are the same wherever they stand."""
        number = self.kernel.instructions[at].operands[0]
        return -int(number) if number.isdecimal() and number != "0" else at

    def _end(self, lanes: Lanes) -> None:
        self._alive -= np.bincount(self.block[lanes], minlength=len(self._alive))
        self._release()

    def _release(self) -> None:
        for barrier, waiting in list(self._parked.items()):
            lanes = np.concatenate([each for _, each in waiting])
            here = np.bincount(self.block[lanes], minlength=len(self._alive))
            full = (here == self._alive) & (here > 0)
            if not full.any():
                continue
            self.clocks[full] += 1
            self.latest = max(self.latest, int(self.clocks.max()))
            left = [(at, each[~full[self.block[each]]]) for at, each in waiting]
            self._parked[barrier] = [(at, each) for at, each in left if len(each)]
            if not self._parked[barrier]:
                del self._parked[barrier]
            for at, each in waiting:
                if (free := full[self.block[each]]).any():
                    self._put(at + 1, np.sort(each[free]))
