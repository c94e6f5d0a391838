"""Activations rounded to FP8 (E4M3), for matmuls that multiply codes: `fp8_matmul`."""

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import one_of
from ingot.plugins.f8_rows import INPUT_GROUPS, round_inputs
from ingot.plugins.op import Array, Call, Op

LINE = 128  # the columns of the codes are a multiple: kernels copy whole lines


def reference(call: Call) -> tuple[Array, ...]:
    """Numbers and scales as `f8_rows.round_inputs` makes them; zeros behind the columns of x."""
    x = call.required(0)
    numbers, scales = round_inputs(x, int(call.attrs["group"]))
    return np.pad(numbers, ((0, 0), (0, -x.shape[1] % LINE))), scales


def out_cols(cols: Sequence[int | None], attrs: Mapping[str, Attr]) -> tuple[int, ...]:
    """Columns of codes and of scales."""
    filled, group = -(-(cols[0] or 0) // LINE) * LINE, int(attrs["group"])
    return filled, filled // group if group else 1


OP = Op(
    name="round_to_fp8",
    inputs=("x",),
    outputs=("codes", "scales"),  # f8 [rows, K up to a multiple of LINE]; [rows, groups], without groups [rows, 1]
    # group: columns that share a scale, 0: all of a row
    attrs={"group": int},
    out_cols=out_cols,
    reference=reference,
    attr_rules={"group": one_of(*INPUT_GROUPS)},
    rounds=True,
)
