"""What an op's reference sees of a weight: its shape, its numbers, and products with it.

The weight says where its numbers come from and how many of them are in memory at a time. The reference says what is
computed with them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, to_float32
from ingot.plugins.f8_rows import F8Rows, RoundedRows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.quantised import Float32, Int8, QuantisedRows, round_to_int8
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows

EXACT_K = 1024  # 127 * 127 * 1024 < 2^24

Inputs = Float32 | RoundedRows
"""Of a product, [rows, K]."""


class WeightValues(Protocol):
    """A weight of one step. shape: the logical one, as in the plan."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def values(self) -> Float32:
        """All numbers, [*shape]."""
        ...

    def rows(self, numbers: npt.NDArray[np.integer]) -> Float32:
        """These rows of a table, [len(numbers), cols]."""
        ...

    def products(self, parts: Sequence[tuple[int, Inputs]], activations: str) -> Iterator[Float32]:
        """x @ matrix.T for each (number of an expert, x), in this order, experts ascending; float32 [rows, N].

        A weight without experts has one part, of number 0. activations: as in `product`.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldWeight:
    """A weight that is in memory as a whole."""

    held: Float32 | WeightRows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def values(self) -> Float32:
        """Quantised rows become the values that they stand for."""
        return self.held.values if isinstance(self.held, WeightRows) else self.held

    def rows(self, numbers: npt.NDArray[np.integer]) -> Float32:
        """In quantised weights, only these rows are multiplied out."""
        return self.held.take(numbers).values if isinstance(self.held, WeightRows) else self.held[numbers]

    def products(self, parts: Sequence[tuple[int, Inputs]], activations: str) -> Iterator[Float32]:
        """One matrix after the other."""
        for expert, x in parts:
            yield product(x, self._matrix(expert), activations)

    def _matrix(self, expert: int) -> Float32 | WeightRows:
        if len(self.shape) == 2:
            return self.held
        return self.held.take(expert) if isinstance(self.held, WeightRows) else self.held[expert]


def product(x: Inputs, weight: Float32 | WeightRows, activations: str) -> Float32:
    """x @ weight.T, float32 [rows, N].

    activations  f32: x as it is; bf16, f16: x rounded to that first (what AMX tiles and GPUs take); sums are float32
                 or wider, and of a quantised weight they run over x * q and are multiplied by the row's scale at the
                 end. Both factors have that type: q is rounded to it too, where numbers of groups made it (w8 and w4
                 have whole numbers, which bf16 holds)
    bf16_inputs  x rounded to bf16, a quantised weight as it is
                 int8: x rounded per row (`round_to_int8`); of q * a the int32 sum is exact, so that every order of
                 additions gives the same bits: p = float32(sum) * (a_scale * scale), both products in float32;
                 of rows in groups the sum is `GroupedRows.int8_product`, or that of `UnitRows`
    fp8          of FP8 weights: `F8Rows.product`; x may be rounded before
    """
    if activations == "fp8" or isinstance(x, RoundedRows):
        assert isinstance(weight, F8Rows), "inputs are rounded to FP8 beside weights of FP8 alone"
        return weight.product(x)
    rounds_to = DType(activations) if activations in ("bf16", "f16") else None
    if rounds_to is not None or activations == "bf16_inputs":
        x = _rounded(x, rounds_to or DType.BF16)
    if isinstance(weight, np.ndarray):
        return (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)
    if activations == "int8":
        codes, a_scale = round_to_int8(x)
        if isinstance(weight, (GroupedRows, UnitRows)):
            return weight.int8_product(codes) * (a_scale[:, None] * weight.scale)
        assert isinstance(weight, QuantisedRows), "products of f8 take floats"
        return _integer_product(codes, weight.integers).astype(np.float32) * (a_scale[:, None] * weight.scale)
    q = factors(weight, rounds_to)
    return (x.astype(np.float64) @ q.astype(np.float64).T).astype(np.float32) * weight.scale


def factors(weight: WeightRows, rounds_to: DType | None) -> Float32 | Int8:
    """What x is multiplied with, before the row's scale [N, K]. rounds_to: the type of both factors; None: float32,
    without a further rounding."""
    if isinstance(weight, QuantisedRows):
        return weight.integers
    return weight.unscaled if rounds_to is None else _rounded(weight.unscaled, rounds_to)


def _rounded(values: Float32, dtype: DType) -> Float32:
    return to_float32(from_float32(values, dtype), dtype)


def _integer_product(a: Int8, q: Int8) -> npt.NDArray[np.float64]:
    """a @ q.T, exact: float32 holds every sum of EXACT_K products of signed bytes, float64 every sum of those."""
    total = np.zeros((len(a), len(q)))
    for k in range(0, a.shape[1], EXACT_K):
        part = np.s_[:, k : k + EXACT_K]
        total += a[part].astype(np.float32) @ q[part].astype(np.float32).T
    return total
