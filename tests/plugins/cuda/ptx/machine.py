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
from tests.plugins.cuda.ptx.happened import Happened
from tests.plugins.cuda.ptx.instructions import Instructions
from tests.plugins.cuda.ptx.memory import Allocations, KernelError, Region
from tests.plugins.cuda.ptx.order import ranks
from tests.plugins.cuda.ptx.parse import Instruction, Kernel
from tests.plugins.cuda.ptx.races import Threads
from tests.plugins.cuda.ptx.waits import Waits, parts_blocks

Lanes = npt.NDArray[np.int64]

_AT_ONCE = 1 << 15  # threads
_PARTED_AT_ONCE = 1 << 11  # of blocks whose warps wait for some others: each thread knows of each what it has done


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
        step = max(1, (_PARTED_AT_ONCE if parts_blocks(kernel, threads) else _AT_ONCE) // threads)
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
        parted = parts_blocks(kernel, threads)
        self.happened = Happened(self.count, threads, clock, int(self.number[0])) if parted else None
        self.shared = Region(
            f"shared memory ({self.shared_bytes} bytes a block)",
            np.full(max(16, self.shared_bytes * len(blocks)), 0xFF, np.uint8),
            fresh=True,
            warps=threads // 32 if parted else 0,
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
        self._waits = Waits(self)
        self._groups: dict[int, Lanes] = {}
        self._ranks = ranks(kernel)
        self._order: list[tuple[int, int]] = []  # of groups: their rank, and where they are
        self._counted: Counter[str] = Counter()
        self.issued: Counter[int] = Counter()
        self.code = Instructions(self, self._waits)
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
        happened = self.happened
        clocks = self.clocks[self.block[lanes]] if happened is None else np.full(len(lanes), happened.now)
        return Threads(self.number[lanes], clocks, self.warp_clocks[lanes // 32], self.threads, self.begin, happened)

    def require_warps(self, lanes: Lanes) -> None:
        """Raises KernelError unless all threads of each warp are together."""
        if len(lanes) % 32 or (lanes.reshape(-1, 32)[:, 0] % 32).any() or (np.diff(lanes.reshape(-1, 32)) != 1).any():
            raise KernelError("a warp whose threads are not together runs an instruction of whole warps")

    def run(self) -> Counter[str]:
        self.put(0, np.arange(self.count))
        with np.errstate(all="ignore"):
            while self._order:
                _, at = heapq.heappop(self._order)
                lanes = self._groups.pop(at, None)
                if lanes is not None:
                    self._advance(at, lanes)
        for at in self._waits.parked():
            raise KernelError(f"{self.kernel.name}: threads wait for ever at instruction {at}, {self._text(at)}")
        self.code.check_ended()
        if self.happened is not None:
            self.latest = max(self.latest, self.happened.now)
        return self._counted

    def _text(self, at: int) -> str:
        return self.kernel.instructions[at].text

    def put(self, at: int, lanes: Lanes) -> None:
        """These threads go on there."""
        before = self._groups.get(at)
        if before is None:
            self._groups[at] = lanes
            heapq.heappush(self._order, (self._ranks[at], at))
        else:
            self._groups[at] = np.sort(np.concatenate([before, lanes]))

    def pass_wait(self, at: int, lanes: Lanes, *, given: bool) -> None:
        """These threads go on behind the mbarrier.try_wait there. given: whether the signal is."""
        self.code.tell(self.kernel.instructions[at].operands[0], lanes, given)
        self.put(at + 1, lanes)

    def _advance(self, at: int, lanes: Lanes) -> None:
        """Until others have to come first."""
        instructions, warps = self.kernel.instructions, len(np.unique(lanes // 32))
        stop = self._order[0][0] if self._order else len(instructions) + 1
        while True:
            if at >= len(instructions):
                return self._end(lanes)
            each = instructions[at]
            if self.happened is not None:
                self.happened.now += 1
            self._counted[each.op[0]] += warps
            self.issued[at] += warps
            taken = self._guarded(each, lanes)
            try:
                if each.op[0] == "bra":
                    return self._branch(at, lanes, taken, self.kernel.labels[each.operands[0]])
                if each.op[0] in ("ret", "exit"):
                    if len(taken) < len(lanes):
                        self.put(at + 1, np.setdiff1d(lanes, taken))
                    return self._end(taken)
                if each.op[0] in ("bar", "barrier") and "warp" not in each.op:
                    return self._meet(at, each, lanes, taken)
                if each.op[:2] == ("mbarrier", "try_wait"):
                    return self._waits.try_wait(at, *self.code.waiters(each, lanes, taken))
                if len(taken):
                    self.code.closure(at, each)(taken)
            except KernelError as fault:
                raise KernelError(f"{self.kernel.name}, instruction {at}, {each.text}: {fault}") from None
            at += 1
            if self._ranks[at] >= stop:
                return self.put(at, lanes)

    def _guarded(self, each: Instruction, lanes: Lanes) -> Lanes:
        if not each.guard:
            return lanes
        predicate = self.register(each.guard)[lanes]
        guarded: Lanes = lanes[~predicate if each.negated else predicate]
        return guarded

    def _branch(self, at: int, lanes: Lanes, taken: Lanes, target: int) -> None:
        if len(taken):
            self.put(target, taken)
        if len(taken) < len(lanes):
            self.put(at + 1, np.setdiff1d(lanes, taken, assume_unique=True))

    def _meet(self, at: int, each: Instruction, lanes: Lanes, taken: Lanes) -> None:
        """At a barrier of the block."""
        if len(taken) < len(lanes):
            raise KernelError("a barrier under a predicate that is not the same in all threads")
        for number, some in self.code.by_barrier(each, lanes):
            self._waits.meet(at, each, some, number)
        if "arrive" in each.op:
            self.put(at + 1, lanes)

    def _end(self, lanes: Lanes) -> None:
        self._waits.end(lanes)
