"""Product with a packed weight and its epilogue: bias, activation, gate, residual."""

import dataclasses
from collections.abc import Mapping

from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.attributes import PRODUCT_RULES, is_flag, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse, plain_work
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """y = epilogue(x @ weight.T); activations round x, as in `weight_values.product`"""
    (p,) = call.weight(1).products([(0, call.required(0))], str(call.attrs["activations"]))
    return (epilogue(p, call.optional(2), call.optional(3), call.attrs),)


def epilogue(p: Array, bias: Array | None, residual: Array | None, attrs: Mapping[str, Attr]) -> Array:
    """p + bias; gated: y = activation(p[:, :I]) * p[:, I:], else y = activation(p); then + residual"""
    if bias is not None:
        p = p + bias
    activate = ACTIVATIONS[str(attrs["activation"])]
    if attrs["gated"]:
        half = p.shape[1] // 2
        y = activate(p[:, :half]) * p[:, half:]
    else:
        y = activate(p)
    return y if residual is None else y + residual


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Input and weight must agree on K; bias and residual must fit the output."""
    (k,), weight, bias, residual = shapes[0] or (0,), shapes[1] or (), shapes[2], shapes[3]
    if len(weight) != 2 or weight[1] != k:
        return f"an input of {k} columns cannot be multiplied with a weight {weight}"
    if attrs["gated"] and weight[0] % 2:
        return f"a gated product needs an even number of rows, not {weight[0]}"
    out = weight[0] // 2 if attrs["gated"] else weight[0]
    return unequal("bias", bias, weight[0]) or unequal("residual", residual, out)


def work(use: OpUse) -> Work:
    """A multiply-add for each number of the weight and each row."""
    n, k = use.weight(1).shape
    return dataclasses.replace(plain_work(use), operations=2 * use.rows * n * k)


OP = Op(
    name="matmul",
    inputs=("x", "weight", "bias?", "residual?"),  # [rows, K], [N, K] packed, [N], [rows, out]
    outputs=("y",),  # [rows, out], out = N / 2 if gated else N; y may be the residual's buffer (in place)
    # group: columns that share a multiplier of a w4 weight, 0 for all other weights
    attrs={"activation": "none", "gated": 0, "activations": "f32", "group": 0},
    out_cols=lambda cols, attrs: ((cols[1] or 0) // (2 if attrs["gated"] else 1),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={**PRODUCT_RULES, "activation": one_of(*ACTIVATIONS), "gated": is_flag},
    work=work,
    packed=1,
    residual=3,
    gated=lambda attrs: bool(attrs.get("gated", 0)),
    vectors=(2,),
    in_place=((0, 3),),
)
