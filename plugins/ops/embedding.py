"""Rows of a token table, plus rows of a position table where the model learns positions."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr, Rows
from ingot.plugins.op import Array, Call, Op, Shapes
from ingot.plugins.work import OpUse, plain_work
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """out[t] = table[input_ids[t]] * scale (+ position_table[positions[t]]); w8: a row is scale[row] * q[row]"""
    out = call.weight(0).rows(call.integers(2)) * np.float32(call.attrs["scale"])
    if call.inputs[1] is not None:
        out = out + call.weight(1).rows(call.integers(3))
    return (out,)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """The tables must have the same number of columns."""
    tables = [shape for shape in shapes if shape is not None]
    if any(len(shape) != 2 for shape in tables) or len({shape[-1] for shape in tables}) != 1:
        return f"tables {tables} are not matrices of one width"
    return None


def work(use: OpUse) -> Work:
    """A row of each table is read per token."""
    rows = sum(weight.nbytes // weight.shape[0] for weight in use.weights if weight is not None)
    return dataclasses.replace(plain_work(use), nbytes=use.activation_bytes + use.rows * rows)


OP = Op(
    name="embedding",
    inputs=("table", "position_table?", "input_ids", "positions?"),  # [vocab, hidden], [positions, hidden]
    outputs=("out",),  # [tokens, hidden]
    attrs={"scale": 1.0},
    out_cols=lambda cols, attrs: (cols[0] or 0,),
    reference=reference,
    size_problem=size_problem,
    work=work,
    tables={0: lambda plan: plan.vocab_size, 1: lambda plan: plan.max_positions},
    batch_inputs={2: 0, 3: 1},
    rows=Rows.TOKENS,
    step_name="embed",
)
