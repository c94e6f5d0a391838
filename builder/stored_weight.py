"""A weight of the checkpoint as the references of ops take it: floats, a block of rows in memory at a time."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.expressions import WeightReader, matrix_shape
from ingot.builder.pack import BLOCK_BYTES, WeightUse
from ingot.plugins.op import Array
from ingot.plugins.weight_values import Inputs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """What `plugins/weight_values.py` asks of a weight."""

    use: WeightUse
    reader: WeightReader

    @property
    def shape(self) -> tuple[int, ...]:
        return self.use.shape

    @property
    def values(self) -> Array:
        return self.reader.read_rows(self.use.tensor, 0, matrix_shape(self.use.tensor)[0]).reshape(self.shape)

    def rows(self, numbers: npt.NDArray[np.integer]) -> Array:
        """Each is read once."""
        distinct, places = np.unique(numbers, return_inverse=True)
        found = [self.reader.read_rows(self.use.tensor, int(number), int(number) + 1) for number in distinct]
        table: Array = np.concatenate(found)[places.reshape(-1)]
        return table

    def products(self, parts: Sequence[tuple[int, Inputs]], activations: str) -> Iterator[Array]:
        """One matrix after the other."""
        assert activations == "f32", "rounded inputs are measured beside the others"
        for expert, x in parts:
            assert isinstance(x, np.ndarray), "of a plan in float32"
            yield self.product(expert, x)

    def product(self, expert: int, x: Array) -> Array:
        """x @ the expert's matrix transposed, float32 [rows, N]"""
        n, k = self.shape[-2:]
        p: Array = np.empty((len(x), n), np.float32)
        block = max(1, BLOCK_BYTES // (4 * k))
        for begin in range(0, n, block):
            end = min(begin + block, n)
            p[:, begin:end] = x @ self.read(expert * n + begin, expert * n + end).T
        return p

    def read(self, begin: int, end: int) -> Array:
        """Rows of all its matrices, one below the other."""
        return self.reader.read_rows(self.use.tensor, begin, end)
