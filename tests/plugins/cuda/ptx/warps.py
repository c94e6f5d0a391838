"""Instructions of whole warps."""

from collections.abc import Callable

import numpy as np

from tests.plugins.cuda.ptx.arithmetic import dtype_of
from tests.plugins.cuda.ptx.matrix import multiply_16_8, spread_matrix
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.operands import Lanes, Operands, names_of
from tests.plugins.cuda.ptx.parse import Instruction

Closure = Callable[[Lanes], None]


class WarpInstructions(Operands):
    """Each method's name is that of an instruction."""

    def _bar(self, each: Instruction) -> Closure:
        def meet(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            self._run.warp_clocks[np.unique(lanes // 32)] += 1
            if self._run.happened is not None:
                self._run.happened.meet(lanes)

        return meet

    def _setmaxnreg(self, each: Instruction) -> Closure:
        return self._run.require_warps

    def _shfl(self, each: Instruction) -> Closure:
        to, _, ok = each.operands[0].partition("|")
        source, by, clamp, mask = (self._reader(operand, "b32") for operand in each.operands[1:])
        write, tell = self._writer(to, "b32"), self._writer(ok or "_", "pred")
        way = each.op[2]

        def shuffle(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            if (mask(lanes) != 0xFFFFFFFF).any():
                raise KernelError("a shuffle among some threads of a warp")
            lane, c = lanes % 32, clamp(lanes).astype(np.int64)
            segment, limit = c >> 8 & 31, c & 31
            high, low = (lane & segment) | (limit & ~segment), lane & segment
            b = by(lanes).astype(np.int64) & 31
            other = {"bfly": lane ^ b, "up": lane - b, "down": lane + b, "idx": low | (b & ~segment)}[way]
            inside = other >= high if way == "up" else other <= high
            values = np.broadcast_to(source(lanes), len(lanes)).reshape(-1, 32)
            chosen = np.where(inside, other, lane).reshape(-1, 32)
            write(lanes, np.take_along_axis(values, chosen, 1).reshape(-1))
            tell(lanes, inside)

        return shuffle

    def _vote(self, each: Instruction) -> Closure:
        read, way = self._reader(each.operands[1], "pred"), each.op[2]
        write = self._writer(each.operands[0], each.op[-1])

        def vote(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            said = np.broadcast_to(read(lanes), len(lanes)).reshape(-1, 32)
            bits = (said.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
            found = {"ballot": bits, "any": said.any(1), "all": said.all(1)}[way]
            write(lanes, np.repeat(found, 32).astype(dtype_of(each.op[-1])))

        return vote

    def _ldmatrix(self, each: Instruction) -> Closure:
        writers, address = [self._writer(n, "b32") for n in names_of(each.operands[0])], self._address(each.operands[1])

        def load(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            used = lanes.reshape(-1, 32)[:, : 8 * len(writers)].reshape(-1)
            ((_, region, offsets),) = self._places(each, address(used), 16, used)
            region.note_read(offsets, 16, self._run.who(used))
            rows = region.data.reshape(-1, 16)[offsets // 16].view(np.uint16).reshape(-1, len(writers), 8, 8)
            for index, write in enumerate(writers):
                write(lanes, spread_matrix(rows[:, index], transposed="trans" in each.op).reshape(-1))

        return load

    def _mma(self, each: Instruction) -> Closure:
        shape = "m16n8k32" if each.op[-2] == "e4m3" else "m16n8k16"
        if shape not in each.op or each.op[-2] != each.op[-3] or each.op[-1] != "f32":
            raise KernelError("the interpreter does not know this product")
        to, a, b, c = (names_of(operand) for operand in each.operands)
        writers = [self._writer(name, "f32") for name in to]
        readers = [[self._reader(name, kind) for name in names] for names, kind in ((a, "b32"), (b, "b32"), (c, "f32"))]

        def multiply(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            left, right, sums = (
                [np.broadcast_to(read(lanes), len(lanes)).reshape(-1, 32) for read in part] for part in readers
            )
            for write, values in zip(writers, multiply_16_8(left, right, sums, each.op[-2]), strict=True):
                write(lanes, values.reshape(-1))

        return multiply
