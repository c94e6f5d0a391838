"""Instructions → functions over the threads that run them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.plugins.cuda.ptx.arithmetic import dtype_of, find
from tests.plugins.cuda.ptx.groups import GroupInstructions
from tests.plugins.cuda.ptx.memory import SHARED_WINDOW, KernelError
from tests.plugins.cuda.ptx.operands import ADDRESS, Lanes, Values, names_of
from tests.plugins.cuda.ptx.parse import Instruction
from tests.plugins.cuda.ptx.races import Threads
from tests.plugins.cuda.ptx.waits import Copies, Waits
from tests.plugins.cuda.ptx.warps import Closure

if TYPE_CHECKING:
    from tests.plugins.cuda.ptx.machine import _Run


class Instructions(GroupInstructions):
    """Those of one run. Each is made when it first runs."""

    def __init__(self, run: "_Run", waits: Waits) -> None:
        super().__init__(run)
        self._waits = waits
        self._made: dict[int, Closure] = {}
        self._copies = _Copies(run)

    def closure(self, at: int, each: Instruction) -> Closure:
        """What the instruction does."""
        made = self._made.get(at)
        if made is None:
            made = self._made[at] = self._make(each)
        return made

    def _make(self, each: Instruction) -> Closure:
        name = each.op[0]
        if name in ("membar", "griddepcontrol"):
            return lambda lanes: None
        special: Callable[[Instruction], Closure | None] | None = getattr(self, f"_{name}", None)
        if special is not None and (made := special(each)) is not None:
            return made
        operation = find(each.op)
        if operation is None:
            raise KernelError("the interpreter does not know this instruction")
        if len(each.operands) - 1 != len(operation.sources):
            raise KernelError(f"the interpreter knows {each.op[0]} with other operands")
        sources = [self._reader(a, kind) for a, kind in zip(each.operands[1:], operation.sources, strict=True)]
        write, compute = self._writer(each.operands[0], operation.result), operation.compute
        return lambda lanes: write(lanes, compute(*(read(lanes) for read in sources)))

    # Waits.

    def by_barrier(self, each: Instruction, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """(number of a barrier, who comes there). Raises KernelError."""
        numbers = np.broadcast_to(self._reader(each.operands[0], "u32")(lanes), len(lanes)).astype(np.int64)
        return [(number, lanes[numbers == number]) for number in np.unique(numbers).tolist()]

    def waiters(self, each: Instruction, lanes: Lanes, taken: Lanes) -> tuple[Lanes, Lanes, Lanes]:
        """(who, for which signals, with which parity) of an mbarrier.try_wait. Raises KernelError."""
        if each.op[2] != "parity" or len(taken) < len(lanes):
            raise KernelError("the interpreter does not know this wait")
        parity = np.broadcast_to(self._reader(each.operands[2], "u32")(lanes), len(lanes)).astype(np.int64)
        return lanes, self._signals(each.operands[1], lanes), parity

    def tell(self, predicate: str, lanes: Lanes, value: bool) -> None:
        """Set it."""
        self._writer(predicate, "pred")(lanes, np.full(len(lanes), value))

    def _signals(self, operand: str, lanes: Lanes) -> Lanes:
        """Places in shared memory."""
        places = self._address(operand)(lanes)
        if (places % np.uint64(8)).any():
            raise KernelError("an address that is no multiple of 8")
        self._in_shared(places, 8, lanes)
        return places.astype(np.int64)

    def _mbarrier(self, each: Instruction) -> Closure:
        if each.op[1] == "arrive" and each.operands[0] == "_" and len(each.operands) == 2:
            return lambda lanes: self._waits.arrive(lanes, self._signals(each.operands[1], lanes), [])
        if each.op[1] != "init":
            raise KernelError("the interpreter does not know this instruction")
        count = self._reader(each.operands[1], "u32")

        def make(lanes: Lanes) -> None:
            places = self._signals(each.operands[0], lanes)
            offsets = places + self._run.block[lanes] * self._run.shared_bytes
            self._run.shared.note_write(offsets, 8, self._run.who(lanes))
            self._waits.make(lanes, places, np.broadcast_to(count(lanes), len(lanes)).astype(np.int64))

        return make

    # Moves.

    def _mov(self, each: Instruction) -> Closure | None:
        to, source = each.operands
        if "{" not in to + source:
            return None
        parts = names_of(to if "{" in to else source)
        width = 8 * dtype_of(each.op[-1]).itemsize // len(parts)
        if "{" in to:
            read, writers = self._reader(source, each.op[-1]), [self._writer(part, f"b{width}") for part in parts]

            def split(lanes: Lanes) -> None:
                whole = read(lanes).astype(np.uint64)
                for index, write in enumerate(writers):
                    write(lanes, (whole >> np.uint64(index * width)).astype(f"u{width // 8}"))

            return split
        readers, put = [self._reader(part, f"b{width}") for part in parts], self._writer(to, each.op[-1])

        def join(lanes: Lanes) -> None:
            whole = np.zeros(len(lanes), np.uint64)
            for index, read in enumerate(readers):
                whole |= read(lanes).astype(np.uint64) << np.uint64(index * width)
            put(lanes, whole.astype(dtype_of(each.op[-1])))

        return join

    def _cvt(self, each: Instruction) -> Closure | None:
        """Two floats to two halves: the first goes to the upper one."""
        if each.op[-2:] not in (("bf16x2", "f32"), ("f16x2", "f32")):
            return None
        narrow = find(("cvt", "rn", each.op[-2].removesuffix("x2"), "f32"))
        assert narrow is not None
        upper, lower = (self._reader(name, "f32") for name in each.operands[1:])
        write = self._writer(each.operands[0], "b32")

        def join(lanes: Lanes) -> None:
            halves = [narrow.compute(read(lanes)).view(np.uint16).astype(np.uint32) for read in (upper, lower)]
            write(lanes, halves[0] << np.uint32(16) | halves[1])

        return join

    def _cvta(self, each: Instruction) -> Closure:
        read, write = self._reader(each.operands[1], "u64"), self._writer(each.operands[0], "u64")
        window = np.uint64(SHARED_WINDOW if "shared" in each.op else 0)
        if "to" in each.op:
            return lambda lanes: write(lanes, read(lanes) - window)
        return lambda lanes: write(lanes, read(lanes) + window)

    # Memory.

    def _ld(self, each: Instruction) -> Closure:
        if "param" in each.op:
            return self._load_parameter(each)
        kind = dtype_of(each.op[-1])
        address = self._address(each.operands[1])
        writers = [self._writer(name, each.op[-1]) for name in names_of(each.operands[0])]

        def load(lanes: Lanes) -> None:
            for which, region, offsets in self._places(each, address(lanes), kind.itemsize * len(writers), lanes):
                who = self._run.who(lanes[which])
                for index, write in enumerate(writers):
                    write(lanes[which], region.load(offsets + index * kind.itemsize, kind, who))

        return load

    def _load_parameter(self, each: Instruction) -> Closure:
        match = ADDRESS.fullmatch(each.operands[1])
        assert match is not None
        begin = self._run.kernel.parameters[match[1]][0] + int(match[2] or 0)
        kind, writers = dtype_of(each.op[-1]), [self._writer(n, each.op[-1]) for n in names_of(each.operands[0])]
        values = np.frombuffer(self._run.parameters, kind, len(writers), begin)

        def load(lanes: Lanes) -> None:
            for write, value in zip(writers, values, strict=True):
                write(lanes, value)

        return load

    def _st(self, each: Instruction) -> Closure:
        kind = dtype_of(each.op[-1].replace("f", "b"))
        address = self._address(each.operands[0])
        readers = [self._reader(name, f"b{8 * kind.itemsize}") for name in names_of(each.operands[1])]

        def store(lanes: Lanes) -> None:
            for which, region, offsets in self._places(each, address(lanes), kind.itemsize * len(readers), lanes):
                some = lanes[which]
                who = self._run.who(some)
                for index, read in enumerate(readers):
                    values = np.broadcast_to(read(some), len(some))
                    region.store(offsets + index * kind.itemsize, values, who)

        return store

    def _atom(self, each: Instruction) -> Closure:
        return self._atomic(each, each.operands[0], each.operands[1:])

    def _red(self, each: Instruction) -> Closure:
        return self._atomic(each, "_", each.operands)

    def _atomic(self, each: Instruction, to: str, operands: tuple[str, ...]) -> Closure:
        kind, way = dtype_of(each.op[-1]), next(part for part in each.op[1:] if part in _CHANGES or part == "cas")
        address, write = self._address(operands[0]), self._writer(to, each.op[-1])
        readers = [self._reader(operand, each.op[-1]) for operand in operands[1:]]

        def change(lanes: Lanes) -> None:
            for which, region, offsets in self._places(each, address(lanes), kind.itemsize, lanes):
                some = lanes[which]
                region.note_atomic(offsets, kind.itemsize, self._run.who(some))
                given = [np.broadcast_to(read(some), len(some)) for read in readers]
                write(some, _in_turn(region.view(kind), offsets // kind.itemsize, way, given))

        return change

    def _cp(self, each: Instruction) -> Closure:
        if "commit_group" in each.op:
            return self._copies.commit
        if "mbarrier" in each.op:
            if "noinc" not in each.op:
                raise KernelError("the interpreter does not know this instruction")
            return lambda lanes: self._waits.arrive(
                lanes, self._signals(each.operands[0], lanes), self._copies.take(lanes)
            )
        if "wait_group" in each.op or "wait_all" in each.op:
            left = int(each.operands[0]) if each.operands else 0
            return lambda lanes: self._copies.wait(lanes, left)
        if (*each.op[1:3], each.operands[2]) not in (("async", "cg", "16"), ("async", "ca", "4")):
            raise KernelError("the interpreter does not know this copy")
        whole = int(each.operands[2])
        to, source = (self._address(operand) for operand in each.operands[:2])
        size = self._reader(each.operands[3] if len(each.operands) > 3 else str(whole), "u32")

        def copy(lanes: Lanes) -> None:
            ((_, region, offsets),) = self._places(each, to(lanes), whole, lanes)
            sizes, places = np.broadcast_to(size(lanes), len(lanes)), source(lanes)
            if (places % np.uint64(whole)).any():
                raise KernelError(f"a source that is no multiple of {whole}")
            who = self._run.who(lanes)
            region.note_write(offsets, whole, who, copy=True)
            data = np.zeros((len(lanes), whole), np.uint8)
            full = np.flatnonzero(sizes == whole)
            if not np.isin(sizes, (0, whole)).all():
                raise KernelError(f"a copy of a part of {whole} bytes")
            for which, where, begins in self._run.memory.find(places[full], whole):
                where.note_read(begins, whole, who.pick(full[which]))
                data[full[which]] = where.data[begins[:, None] + np.arange(whole)]
            self._copies.begin(lanes, offsets, data)

        return copy


class _Copies:
    """Asynchronous copies under way: they arrive when their thread waits for them, not earlier."""

    def __init__(self, run: "_Run") -> None:
        self._run = run
        self._committed = np.zeros(run.count, np.int64)  # groups of each thread
        self._open: list[tuple[Lanes, Lanes, npt.NDArray[np.uint8], Lanes]] = []

    def begin(self, lanes: Lanes, offsets: Lanes, data: npt.NDArray[np.uint8]) -> None:
        self._open.append((lanes, offsets, data, self._committed[lanes]))

    def commit(self, lanes: Lanes) -> None:
        self._committed[lanes] += 1

    def take(self, lanes: Lanes) -> Copies:
        """Those of these threads, which somebody else waits for: they arrive with the signal that they give."""
        taken, kept = list[tuple[Threads, Lanes, npt.NDArray[np.uint8]]](), []
        for threads, offsets, data, group in self._open:
            which = np.isin(threads, lanes)
            if which.any():
                taken.append((self._run.who(threads[which]), offsets[which], data[which]))
            if not which.all():
                kept.append((threads[~which], offsets[~which], data[~which], group[~which]))
        self._open = kept
        return taken

    def wait(self, lanes: Lanes, left: int) -> None:
        """Until at most `left` groups are under way."""
        waits = np.zeros(self._run.count, np.bool_)
        waits[lanes] = True
        kept = []
        for threads, offsets, data, group in self._open:
            done = waits[threads] & (group < self._committed[threads] - left)
            if done.any():
                self._run.shared.end_copy(offsets[done], data[done], self._run.who(threads[done]))
            if not done.all():
                kept.append((threads[~done], offsets[~done], data[~done], group[~done]))
        self._open = kept


_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda before, value: before + value,
    "or": lambda before, value: before | value,
    "and": lambda before, value: before & value,
    "xor": lambda before, value: before ^ value,
    "exch": lambda before, value: value,
    "min": min,
    "max": max,
}


def _in_turn(whole: Values, at: Lanes, way: str, given: list[Values]) -> Values:
    """One thread after the other; what each found."""
    found = np.empty(len(at), whole.dtype)
    for index, place in enumerate(at.tolist()):
        before = found[index] = whole[place]
        if way == "cas":
            whole[place] = given[1][index] if before == given[0][index] else before
        else:
            whole[place] = _CHANGES[way](before, given[0][index])
    return found
