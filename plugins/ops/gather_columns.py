"""Columns of each row in another order: the input of a product whose weight has its columns in groups of that order."""

import numpy as np

from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y[r, i] = x[r, order[i]]. A number that is none of a column counts as the nearest one, NaN as the first."""
    x, order = call.required(0), call.required(1)
    columns = np.clip(np.nan_to_num(order), 0, x.shape[1] - 1).astype(np.int64)
    gathered: Array = x[:, columns]
    return (gathered,)


OP = Op(
    name="gather_columns",
    inputs=("x", "order"),  # [rows, columns], [count] whole numbers
    outputs=("y",),  # [rows, count]
    attrs={},
    out_cols=lambda cols, attrs: (cols[1] or 0,),
    reference=reference,
    vectors=(1,),
)
