"""The tensors of a quantised Checkpoint: codes and scales of products that are made, and what stays as it was."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated.levels import Float32, round_scale
from ingot.builder.calibrated.methods import Found
from ingot.builder.calibrated.rewrite import Leaf
from ingot.builder.calibrated.unfinished import Unfinished
from ingot.checkpoint import Checkpoint
from ingot.chunks import Checksums
from ingot.dtypes import DType
from ingot.tensor_file import StoredTensor, TensorFileWriter, TensorSpec

_COPY = 4 << 20  # bytes

Progress = Callable[[str, int, int], None]
Bits = npt.NDArray[np.generic]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTensor:
    """A tensor of the result. read: its stored bits, block by block."""

    spec: TensorSpec
    read: Callable[[], Iterator[Bits]]


def pieces(
    kept: Unfinished, number: int, leaf: Leaf, first: int, found: Sequence[Found], divisors: Mapping[str, Float32]
) -> dict[str, NewTensor]:
    """The tensors of a weight, which lies in a product from row `first` on; they are read when they are written.
    divisors: of the rows of weights that take a fold; by then those of all products are known."""
    packed = found[0].levels.highest < 16
    groups = found[0].scales.scale.shape[1]

    def of_leaf(pick: Callable[[Found], Bits]) -> Bits:
        return np.concatenate([pick(each) for each in kept.read(number)])[first : first + leaf.rows]

    def codes() -> Iterator[Bits]:
        stored = of_leaf(lambda each: each.codes)
        yield _nibbles(stored) if packed else stored.view(whole.storage)

    def scale() -> Iterator[Bits]:
        stored, divisor = np.asarray(of_leaf(lambda each: each.scales.scale), np.float32), divisors.get(leaf.name)
        yield stored if divisor is None else round_scale(stored / divisor[:, None])

    def piece(kind: str, dtype: DType, columns: int, read: Callable[[], Iterator[Bits]]) -> NewTensor:
        return NewTensor(
            spec=TensorSpec(name=f"{leaf.name}/{kind}", dtype=dtype, shape=(leaf.rows, columns)), read=read
        )

    whole = DType.F8 if found[0].levels.floats else DType.I8
    dtype, columns = (DType.U8, leaf.columns // 2) if packed else (whole, leaf.columns)
    made = {"codes": piece("codes", dtype, columns, codes)}
    made["scale"] = piece("scale", DType.F32, groups, scale)
    if found[0].levels.zeros:
        made["zero"] = piece("zero", DType.U8, groups, lambda: iter([of_leaf(_zero).astype(np.uint8)]))
    return made


def copied(checkpoint: Checkpoint, tensor: StoredTensor) -> Iterator[Bits]:
    """The bytes of a stored weight, checked."""
    file = checkpoint.open_weights(tensor.file.name)
    try:
        for begin in range(0, tensor.nbytes, _COPY):
            count = min(_COPY, tensor.nbytes - begin)
            yield np.frombuffer(file.read(tensor.offset + begin, count), np.uint8)
    finally:
        file.close()


def write_tensors(
    path: Path, tensors: Sequence[NewTensor], progress: Progress
) -> tuple[Mapping[str, StoredTensor], Checksums]:
    """One safetensors file; where its tensors lie, and its checksums."""
    done, total = 0, sum(each.spec.nbytes for each in tensors)
    with TensorFileWriter(path, [each.spec for each in tensors]) as file:
        for each in tensors:
            for block in each.read():
                file.write(block)
            done += each.spec.nbytes
            progress("writing weights", done, total)
    return file.tensors, file.sums()


def _zero(found: Found) -> Bits:
    assert found.scales.zero is not None, "levels have zero points"
    return found.scales.zero


def _nibbles(codes: Bits) -> Bits:
    """Two to a byte, the first in the low half."""
    low = codes.view(np.uint8) & np.uint8(15)
    packed: Bits = low[:, 0::2] | (low[:, 1::2] << np.uint8(4))
    return packed
