"""Matmul of FP8 weights with inputs that `round_to_fp8` has rounded, and its epilogue as that of `matmul`."""

import dataclasses
from collections.abc import Mapping

from ingot.plan import Attr, Step
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.attributes import PRODUCT_RULES, is_flag, one_of
from ingot.plugins.f8_rows import INPUT_GROUPS, RoundedRows
from ingot.plugins.op import Array, Call, Op, Shapes
from ingot.plugins.ops import matmul, round_to_fp8
from ingot.plugins.work import OpUse, plain_work
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """y = epilogue(x @ weight.T), x = codes * scales; the order of the sums is that of `f8_rows.py`"""
    weight, scales = call.weight(2), call.required(1)
    x = RoundedRows(numbers=call.required(0)[:, : weight.shape[1]], scales=scales)
    (p,) = weight.products([(0, x)], "fp8")
    return (matmul.epilogue(p, call.optional(3), call.optional(4), call.attrs),)


def plain(step: Step) -> Step:
    """The matmul that rounds its input itself."""
    codes, _, *others = step.inputs
    return dataclasses.replace(step, op=matmul.OP.name, inputs=(codes, *others))


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Codes and scales are as wide as `round_to_fp8` makes them of an input of the weight's columns."""
    codes, scales, weight = (shape or () for shape in shapes[:3])
    if len(weight) != 2:
        return f"the weight has shape {weight}"
    wanted = round_to_fp8.out_cols([weight[1]], attrs)
    if (*codes, *scales) != wanted:
        return f"codes {codes} and scales {scales} are not those of an input of {weight[1]} columns"
    return matmul.size_problem([(weight[1],), weight, *shapes[3:]], attrs)


def work(use: OpUse) -> Work:
    """A multiply-add for each number of the weight and each row."""
    n, k = use.weight(2).shape
    return dataclasses.replace(plain_work(use), operations=2 * use.rows * n * k)


OP = Op(
    name="fp8_matmul",
    # as of round_to_fp8; [N, K] packed; [N]; [rows, out]
    inputs=("codes", "scales", "weight", "bias?", "residual?"),
    outputs=("y",),  # as of matmul
    attrs={"activation": "none", "gated": 0, "activations": "fp8", "group": 0},
    out_cols=lambda cols, attrs: ((cols[2] or 0) // (2 if attrs["gated"] else 1),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        **PRODUCT_RULES,
        "activations": one_of("fp8"),
        "group": one_of(*INPUT_GROUPS),
        "activation": one_of(*ACTIVATIONS),
        "gated": is_flag,
    },
    work=work,
    plain=plain,
    packed=2,
    residual=4,
    gated=lambda attrs: bool(attrs.get("gated", 0)),
    vectors=(3,),
    in_place=((0, 4),),
)
