"""Keeps what stands out of a row: activations far above its mean, whose others become zero."""

import numpy as np

from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """y = max(0, x - mean(x) - deviations * std(x)) of each row; std is that of all its numbers, not of a sample.

    If the numbers of a row are normally distributed, a known share of them is kept (Gemma 3n's Gaussian top-k).
    """
    x = call.required(0).astype(np.float64)
    cut = x.mean(axis=1, keepdims=True) + float(call.attrs["deviations"]) * x.std(axis=1, keepdims=True)
    return (np.maximum(x - cut, 0).astype(np.float32),)


OP = Op(
    name="cut_below",
    inputs=("x",),  # [rows, n]
    outputs=("y",),  # [rows, n]
    attrs={"deviations": float},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    in_place=((0, 0),),
)
