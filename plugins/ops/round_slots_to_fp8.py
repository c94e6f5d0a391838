"""What experts have made of each slot rounded to FP8 (E4M3), for products that multiply codes: `fp8_moe_down`."""

import dataclasses
from collections.abc import Mapping, Sequence

from ingot.plan import Attr
from ingot.plugins.attributes import LARGEST, between
from ingot.plugins.op import Array, Call, Shapes
from ingot.plugins.ops import round_to_fp8


def reference(call: Call) -> tuple[Array, ...]:
    """The columns of each slot, as `round_to_fp8` rounds a row."""
    x, slots = call.required(0), int(call.attrs["slots"])
    each = dataclasses.replace(call, inputs=[x.reshape(len(x) * slots, x.shape[1] // slots)])
    codes, scales = round_to_fp8.reference(each)
    return codes.reshape(len(x), slots * codes.shape[1]), scales.reshape(len(x), slots * scales.shape[1])


def out_cols(cols: Sequence[int | None], attrs: Mapping[str, Attr]) -> tuple[int, ...]:
    """Columns of codes and of scales."""
    slots = int(attrs["slots"])
    return tuple(slots * each for each in round_to_fp8.out_cols([(cols[0] or 0) // slots], attrs))


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """Every slot has as many columns."""
    (cols,), slots = shapes[0] or (0,), int(attrs["slots"])
    return f"{cols} columns are not those of {slots} slots" if cols % slots else None


OP = dataclasses.replace(
    round_to_fp8.OP,
    name="round_slots_to_fp8",
    # inputs: [rows, slots * K]; outputs: f8 [rows, slots * (K up to a multiple of LINE)]; [rows, slots * groups]
    attrs={**round_to_fp8.OP.attrs, "slots": int},
    out_cols=out_cols,
    reference=reference,
    size_problem=size_problem,
    attr_rules={**round_to_fp8.OP.attr_rules, "slots": between(1, LARGEST)},
)
