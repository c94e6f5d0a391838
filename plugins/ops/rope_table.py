"""Cosines and sines of rotary positions, once per step for all layers that share their frequencies."""

import numpy as np

from ingot.plan import Rows
from ingot.plugins.op import Array, Call, Op


def reference(call: Call) -> tuple[Array, ...]:
    """angle = float32(positions[t]) * inv_freq in float32; out[t] = [cos(angle) * scale, sin(angle) * scale]"""
    inv_freq = call.required(0)
    angle = (call.integers(1).astype(np.float32)[:, None] * inv_freq[None, :]).astype(np.float64)
    scale = float(call.attrs["scale"])
    return (np.concatenate([np.cos(angle) * scale, np.sin(angle) * scale], axis=-1).astype(np.float32),)


OP = Op(
    name="rope_table",
    inputs=("inv_freq", "positions"),  # [rotary_dim / 2]
    outputs=("cos_sin",),  # [tokens, rotary_dim]: cosines, then sines
    attrs={"scale": 1.0},
    out_cols=lambda cols, attrs: (2 * (cols[0] or 0),),
    reference=reference,
    vectors=(0,),
    batch_inputs={1: 0},
    rows=Rows.TOKENS,
    step_name="rope_table",
)
