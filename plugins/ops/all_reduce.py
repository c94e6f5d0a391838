"""Sum over the ranks of a tensor parallel group, which every rank gets."""

from collections.abc import Sequence

from ingot.plugins.attributes import between
from ingot.plugins.op import MOST_RANKS, Array, Op, alone


def reference(values: Sequence[Array]) -> Array:
    """Neighbours are added, then their sums, and so on. values: of all ranks, in their order; a power of two of them"""
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


OP = Op(
    name="all_reduce",
    inputs=("x",),
    outputs=("y",),
    attrs={"ranks": int},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=alone,
    collective=reference,
    attr_rules={"ranks": between(2, MOST_RANKS)},
)
