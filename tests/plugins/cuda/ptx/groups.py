"""The matrix instructions of warpgroups (wgmma) and the fence before them, by the PTX manual.

A product is computed when its warps wait for it, so that it sees what shared memory holds then. What a kernel must not
do before is a fault: write the registers of a, write what is multiplied, or multiply without a fence.
"""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, to_float32
from tests.plugins.cuda.ptx.matrix import halves
from tests.plugins.cuda.ptx.memory import KernelError
from tests.plugins.cuda.ptx.operands import Lanes, Values, names_of
from tests.plugins.cuda.ptx.parse import Instruction
from tests.plugins.cuda.ptx.warps import Closure, WarpInstructions

if TYPE_CHECKING:
    from tests.plugins.cuda.ptx.machine import _Run

_LANE, _ROWS, _K, _FP8_K = np.arange(32), np.arange(16), np.arange(16), np.arange(32)


@dataclasses.dataclass(slots=True)
class _Product:
    """Of some warps. a, b: descriptors, [warps]; fragment: registers of a instead, and what they hold; sums: registers;
    batch: of each lane."""

    lanes: Lanes
    a: Values | None
    fragment: list[tuple[Any, Values]]
    b: Values
    transposed: bool
    sums: list[Any]
    keep: bool
    kind: str
    batch: Lanes

    def pick(self, which: npt.NDArray[np.bool_]) -> "_Product":
        warps = which.reshape(-1, 32)[:, 0]
        return dataclasses.replace(
            self,
            lanes=self.lanes[which],
            a=None if self.a is None else self.a[warps],
            fragment=[(register, values[which]) for register, values in self.fragment],
            b=self.b[warps],
            batch=self.batch[which],
        )


class GroupInstructions(WarpInstructions):
    """Those of one run."""

    def __init__(self, run: "_Run") -> None:
        super().__init__(run)
        self._begun = np.zeros(run.count, np.bool_)
        self._committed, self._done = np.zeros(run.count, np.int64), np.zeros(run.count, np.uint64)
        self._under_way: list[_Product] = []

    def check_ended(self) -> None:
        """Raises KernelError."""
        if self._under_way:
            raise KernelError(f"{self._run.kernel.name}: products of a warpgroup that nobody waits for")
        groups = self._done.reshape(-1, 128) if self._done.any() else self._done.reshape(-1, 1)
        if (groups != groups[:, :1]).any():
            raise KernelError(f"{self._run.kernel.name}: warps of a group that do not multiply the same")

    def _fence(self, each: Instruction) -> Closure:
        if each.op[1:3] != ("proxy", "async"):
            return lambda lanes: None
        return lambda lanes: self._run.shared.show(self._run.who(lanes))

    def _wgmma(self, each: Instruction) -> Closure:
        way = each.op[1]
        if way == "mma_async":
            return self._multiply_group(each)
        if way == "wait_group":
            return lambda lanes: self._wait(lanes, int(each.operands[0]))

        def note(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            self._begun[lanes] = way == "fence"
            self._committed[lanes] += way == "commit_group"

        return note

    def _multiply_group(self, each: Instruction) -> Closure:
        fp8 = each.op[6] == "e4m3"
        shape = re.fullmatch(rf"m64n(\d+)k{32 if fp8 else 16}", each.op[4])
        if shape is None or each.op[5] != "f32":
            raise KernelError("the interpreter does not know this product")
        names, registers = names_of(each.operands[0]), each.operands[1].startswith("{")
        keep, transposed = self._reader(each.operands[3], "pred"), 0 if fp8 else int(each.operands[-1])
        unknown = fp8 and (registers or len(each.operands) != 6)  # FP8 lies by rows, so nothing says which way
        if unknown or len(names) != int(shape[1]) // 2 or not (registers or fp8 or int(each.operands[-2]) == 0):
            raise KernelError("the interpreter does not know this product")
        sums = [self._run.register(name).view(np.float32) for name in names]
        parts = [self._run.register(name).view(np.uint32) for name in names_of(each.operands[1])] if registers else []
        a, b = None if registers else self._reader(each.operands[1], "u64"), self._reader(each.operands[2], "u64")

        def begin(lanes: Lanes) -> None:
            self._run.require_warps(lanes)
            if not self._begun[lanes].all():
                raise KernelError("a batch of products without wgmma.fence")
            kept = np.broadcast_to(keep(lanes), len(lanes))
            if kept.any() != kept.all():
                raise KernelError("lanes that multiply in different ways")
            one = _Product(
                lanes=lanes,
                a=None if a is None else self._of_warps(a(lanes), lanes),
                fragment=[(part, part[lanes]) for part in parts],
                b=self._of_warps(b(lanes), lanes),
                transposed=bool(transposed),
                sums=sums,
                keep=bool(kept.all()),
                kind=each.op[6],
                batch=self._committed[lanes],
            )
            self._load(one)
            for words in (one.b, one.b if one.a is None else one.a, np.full(len(one.b), len(sums), np.uint64)):
                self._done[lanes] = np.bitwise_xor(self._done[lanes], np.repeat(words, 32)) * np.uint64(0x100000001B3)
            self._under_way.append(one)

        return begin

    def _of_warps(self, values: Values, lanes: Lanes) -> Values:
        each = np.broadcast_to(values, len(lanes)).reshape(-1, 32)
        if (each != each[:, :1]).any():
            raise KernelError("lanes that multiply different tiles")
        return each[:, 0]

    def _wait(self, lanes: Lanes, left: int) -> None:
        self._run.require_warps(lanes)
        waits = np.zeros(self._run.count, np.bool_)
        waits[lanes] = True
        kept = []
        for one in self._under_way:
            over = waits[one.lanes] & (one.batch < self._committed[one.lanes] - left)
            if over.any():
                self._finish(one.pick(over))
            if not over.all():
                kept.append(one.pick(~over))
        self._under_way = kept

    def _finish(self, one: _Product) -> None:
        if any((register[one.lanes] != values).any() for register, values in one.fragment):
            raise KernelError("registers of a change while they are multiplied")
        left, right = self._load(one)
        product = left @ right  # [warps, 16, N]
        row, column = _LANE // 4, 2 * (_LANE % 4)
        for index, register in enumerate(one.sums):
            place = (row + 8 * (index % 4 // 2), 8 * (index // 4) + column + index % 2)
            value = product[:, place[0], place[1]].reshape(-1)
            register[one.lanes] = register[one.lanes] + value if one.keep else value

    def _load(self, one: _Product) -> tuple[Values, Values]:
        """a [warps, 16, K] and b [warps, K, N]."""
        warp, k = one.lanes[::32] // 32 % 4, _FP8_K if one.kind == "e4m3" else _K
        if one.a is not None:
            lines = 16 * warp[:, None, None] + _ROWS[None, :, None]
            left = self._gather(one.a, one.lanes, lines, k[None, None, :], one.kind, transposed=False)
        else:
            left = np.zeros((len(warp), 16, 16), np.float32)
            for index, (_, words) in enumerate(one.fragment):
                for odd, value in enumerate(halves(words.reshape(-1, 32), one.kind)):
                    left[:, _LANE // 4 + 8 * (index % 2), 2 * (_LANE % 4) + odd + 8 * (index // 2)] = value
        columns = np.arange(2 * len(one.sums))[None, None, :]
        return left, self._gather(one.b, one.lanes, columns, k[None, :, None], one.kind, transposed=one.transposed)

    def _gather(self, words: Values, lanes: Lanes, lines: Any, k: Any, kind: str, *, transposed: bool) -> Values:
        """Numbers of the described tiles, in the shape of lines and k together."""
        size = 1 if kind == "e4m3" else 2
        start, leading, stride = (
            ((words >> np.uint64(bit)) & np.uint64(0x3FFF)).astype(np.int64) << 4 for bit in (0, 16, 32)
        )
        if (words >> np.uint64(62) != 1).any() or (words >> np.uint64(49) & np.uint64(7)).any():
            raise KernelError("a descriptor of other lines than those of 128 bytes")
        if (stride != 1024).any() or not np.isin(start % 1024, [0] if transposed else [0, 32, 64, 96]).all():
            raise KernelError("a descriptor of a tile that does not lie on 1024 bytes")
        if transposed and np.max(lines) >= 64 and ((leading == 0) | (leading % 1024 != 0)).any():
            raise KernelError("a descriptor whose panels overlap")
        start, leading = start[:, None, None], leading[:, None, None]
        if transposed:
            offset = start + lines // 64 * leading + k // 8 * 1024 + k % 8 * 128 + lines % 64 * 2
        else:
            offset = start + lines // 8 * 1024 + lines % 8 * 128 + k * size
        offset = offset ^ (offset >> 7 & 7) << 4
        shape = offset.shape
        each = np.repeat(lanes[::32], offset[0].size)
        places = self._in_shared(offset.reshape(-1).astype(np.uint64), size, each)
        self._run.shared.note_units_read(places, size, self._run.who(each))
        if size == 1:
            return to_float32(self._run.shared.view(np.dtype(np.uint8))[places], DType.F8).reshape(shape)
        low, _ = halves(self._run.shared.view(np.dtype(np.uint16))[places // 2].astype(np.uint32), kind)
        return np.asarray(low).reshape(shape)
