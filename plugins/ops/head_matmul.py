"""A product of each head with a weight of its own: queries into the latent space of keys, mixed latents to values."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.attributes import PRODUCT_RULES, between
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse, plain_work
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """y[r, h] = [x[r, h, :K] @ weight[h].T | tail[r, h, K:]]; activations round x[:K], as in the op matmul.

    tail  what x is where it is not rounded before; absent: x
    """
    x, weight, tail = call.required(0), call.weight(1), call.optional(2)
    heads, _, k = weight.shape
    split = x.reshape(len(x), heads, -1)
    parts = [(head, np.ascontiguousarray(split[:, head, :k])) for head in range(heads)]
    products = weight.products(parts, str(call.attrs["activations"]))
    made = np.stack(list(products), axis=1)
    kept = (x if tail is None else tail).reshape(split.shape)[:, :, k:]
    return (np.concatenate([made, kept], axis=2).reshape(len(x), -1),)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Every head has K columns and `kept` ones behind them."""
    (cols,), weight = shapes[0] or (0,), shapes[1] or ()
    if len(weight) != 3 or weight[0] * (weight[2] + int(attrs["kept"])) != cols:
        return f"an input of {cols} columns cannot be multiplied with the weights of heads {weight}"
    if shapes[2] is not None and not attrs["kept"]:
        return "columns that are kept come from an input of their own, and none are kept"
    heads = None if weight[0] == attrs["heads"] else f"{attrs['heads']} heads, the weight has {weight[0]}"
    return heads or unequal("tail", shapes[2], cols)


def work(use: OpUse) -> Work:
    """A multiply-add for each number of the weight and each row."""
    heads, n, k = use.weight(1).shape
    return dataclasses.replace(plain_work(use), operations=2 * use.rows * heads * n * k)


OP = Op(
    name="head_matmul",
    inputs=("x", "weight", "tail?"),  # [rows, heads * (K + kept)], [heads, N, K] packed, as x
    outputs=("y",),  # [rows, heads * (N + kept)]
    # kept: columns of each head that are copied behind its product
    attrs={"heads": int, "kept": 0, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: (int(attrs["heads"]) * ((cols[1] or 0) + int(attrs["kept"])),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={**PRODUCT_RULES, "heads": between(1, 4096), "kept": between(0, 1024)},
    work=work,
    packed=1,
    stacked=True,
    unrounded=lambda attrs: 2 if attrs["kept"] else None,
)
