"""The second half of experts with FP8 weights, whose inputs `round_slots_to_fp8` has rounded: else as `moe_down`."""

import dataclasses
from collections.abc import Mapping

from ingot.plan import Attr, Step
from ingot.plugins.attributes import one_of
from ingot.plugins.f8_rows import INPUT_GROUPS, RoundedRows
from ingot.plugins.op import Array, Call, Shapes
from ingot.plugins.ops import moe_down, round_slots_to_fp8


def reference(call: Call) -> tuple[Array, ...]:
    """As of `moe_down`, x = codes * scales; the order of the sums is that of `f8_rows.py`"""
    ids, k = call.required(1), call.weight(3).shape[2]
    codes, scales = (x.reshape(ids.size, x.shape[1] // ids.shape[1]) for x in (call.required(0), call.required(6)))
    return (moe_down.results(call, RoundedRows(numbers=codes[:, :k], scales=scales)),)


def plain(step: Step) -> Step:
    """The products that round their inputs themselves."""
    return dataclasses.replace(step, op=moe_down.OP.name, inputs=step.inputs[:-1])


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Codes and scales are as wide as `round_slots_to_fp8` makes them of as many columns as the weights have, for every
    slot."""
    *others, scales = shapes
    codes, (slots,), weight = others[0] or (), others[1] or (0,), others[3] or ()
    if len(weight) != 3:
        return f"the weight has shape {weight}"
    k = slots * weight[2]
    if (*codes, *(scales or ())) != round_slots_to_fp8.out_cols([k], {**attrs, "slots": slots}):
        return f"codes {codes} and scales {scales} are not those of {slots} slots of {weight[2]} columns"
    return moe_down.size_problem([(k,), *others[1:]], attrs)


OP = dataclasses.replace(
    moe_down.OP,
    name="fp8_moe_down",
    inputs=("codes", *moe_down.OP.inputs[1:], "scales"),  # codes, scales: as of round_slots_to_fp8
    attrs={**moe_down.OP.attrs, "activations": "fp8"},
    reference=reference,
    size_problem=size_problem,
    attr_rules={**moe_down.OP.attr_rules, "activations": one_of("fp8"), "group": one_of(*INPUT_GROUPS)},
    plain=plain,
)
