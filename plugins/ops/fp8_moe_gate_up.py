"""The first half of experts with FP8 weights, whose inputs `round_to_fp8` has rounded: else as `moe_gate_up`."""

import dataclasses
from collections.abc import Mapping

from ingot.plan import Attr, Step
from ingot.plugins.attributes import one_of
from ingot.plugins.f8_rows import INPUT_GROUPS, RoundedRows
from ingot.plugins.op import Array, Call, Shapes
from ingot.plugins.ops import moe_gate_up, round_to_fp8


def reference(call: Call) -> tuple[Array, ...]:
    """As of `moe_gate_up`, x = codes * scales; the order of the sums is that of `f8_rows.py`"""
    numbers = call.required(0)[:, : call.weight(2).shape[2]]
    return (moe_gate_up.results(call, RoundedRows(numbers=numbers, scales=call.required(5))),)


def plain(step: Step) -> Step:
    """The products that round their inputs themselves."""
    return dataclasses.replace(step, op=moe_gate_up.OP.name, inputs=step.inputs[:-1])


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Codes and scales are as wide as `round_to_fp8` makes them of an input of the weights' columns."""
    *others, scales = shapes
    codes, weight = others[0] or (), others[2] or ()
    if len(weight) != 3:
        return f"the weight has shape {weight}"
    if (*codes, *(scales or ())) != round_to_fp8.out_cols([weight[2]], attrs):
        return f"codes {codes} and scales {scales} are not those of an input of {weight[2]} columns"
    return moe_gate_up.size_problem([(weight[2],), *others[1:]], attrs)


OP = dataclasses.replace(
    moe_gate_up.OP,
    name="fp8_moe_gate_up",
    inputs=("codes", *moe_gate_up.OP.inputs[1:], "scales"),  # codes, scales: as of round_to_fp8
    attrs={**moe_gate_up.OP.attrs, "activations": "fp8"},
    reference=reference,
    size_problem=size_problem,
    attr_rules={**moe_gate_up.OP.attr_rules, "activations": one_of("fp8"), "group": one_of(*INPUT_GROUPS)},
    plain=plain,
)
