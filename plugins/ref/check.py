"""Whether each step of a plan is a use of its op: types and sizes of inputs, attributes, places of results.

`plugins/cpu/execution/binder.h` checks the same for native sessions, and which kernels there are: both take the same
steps.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from ingot.dtypes import PRECISIONS, DType, Precision
from ingot.errors import REBUILD, EngineError
from ingot.plan import Buffer, Plan, Rows, Step, Weight
from ingot.plan_check import buffer_bytes
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.layouts import ROW, num_panels, panel_bytes, panel_layout, row_bytes, row_layout
from ingot.plugins.op import Op
from ingot.plugins.quantised import MAX_K
from ingot.plugins.registry import find_op, op_names
from ingot.step_inputs import require_known_inputs
from ingot.weight_formats import FORMATS, TABLE_FORMAT

_MOST = (1 << 31) - 1
_GROUPS = tuple(group for each in FORMATS.values() for group in each.groups)
_TABLE_DTYPES = (DType.F32, DType.BF16, DType.F16, DType(TABLE_FORMAT.dtype))


def check_steps(plan: Plan) -> None:
    """Raise EngineError for an input that nobody gives, or the first step that no session of any target could run."""
    require_known_inputs(plan)
    checker = _Checker(plan)
    for step in plan.steps:
        if (found := checker.problem(step)) is not None:
            raise EngineError("the engine's plan cannot run", where=f"step {step.name}", got=found, hint=REBUILD)


class _Checker:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._weights = {weight.name: weight for weight in plan.weights}
        self._given = {each.name for each in plan.inputs}

    def problem(self, step: Step) -> str | None:
        """What is wrong with a step, or None."""
        op = find_op(step.op) if step.op in op_names() else None
        if op is None or not op.is_step:
            return f"op {step.op} is no step of a plan"
        if (found := op.problem(step.inputs, step.attrs)) is not None:
            return found
        if len(step.outputs) != len(op.outputs) or not step.outputs[0]:
            return f"gives {len(op.outputs)} outputs, got {len(step.outputs)}"
        checks: Sequence[Callable[[Step, Op], str | None]] = (
            self._attributes,
            self._kinds,
            self._weights_of,
            self._inputs,
            self._outputs,
            self._apart,
        )
        return next((found for check in checks if (found := check(step, op)) is not None), None)

    def _attributes(self, step: Step, op: Op) -> str | None:
        kv = self._plan.kv
        allowed: Mapping[str, Callable[[object], bool]] = {
            "activation": lambda value: value in ACTIVATIONS,
            "activations": lambda value: value in ("f32", "bf16", "f16", "int8"),
            "gated": _is_flag,
            "normalized": _is_flag,
            "interleaved": _is_flag,
            "group": lambda value: value in (0, *_GROUPS),
            "layer": lambda value: _is_between(value, 0, kv.num_layers - 1),
            "heads": lambda value: _is_between(value, 1, 4096),
            "kv_heads": lambda value: value == kv.kv_heads,
            "head_dim": lambda value: value == kv.head_dim,
            "window": lambda value: _is_between(value, 0, _MOST + 1),
            **dict.fromkeys(("eps", "norm_eps", "softcap"), _is_not_negative),
            "cap": lambda value: isinstance(value, float) and value > 0,
            "per_token": lambda value: _is_between(value, 1, _MOST),
        }
        for key, value in step.attrs.items():
            if key in allowed and not allowed[key](value):
                return f"attribute {key} cannot be {value!r}"
        if step.op == "paged_attention" and int(step.attrs["heads"]) % kv.kv_heads:
            return "heads must be a multiple of kv_heads"
        return None

    def _kinds(self, step: Step, op: Op) -> str | None:
        """Weights where the op takes weights, buffers elsewhere."""
        constant = {op.packed, *op.tables, *op.vectors}
        for index, name in enumerate(step.inputs):
            if index in op.batch_inputs:
                kind, known = "input of the plan", name in self._given
            elif index in constant:
                kind, known = "weight", name in self._weights
            else:
                kind, known = "buffer", name in self._buffers
            if name and not known:
                return f"input {op.inputs[index].rstrip('?')} is no {kind}: {name}"
        return next((f"there is no buffer {name}" for name in step.outputs if name and name not in self._buffers), None)

    def _weights_of(self, step: Step, op: Op) -> str | None:
        found = None if op.packed is None else _product_problem(self._weights[step.inputs[op.packed]], step)
        for places, dtypes, dimensions in ((op.tables, _TABLE_DTYPES, 2), (op.vectors, (DType.F32,), 1)):
            for name in (step.inputs[place] for place in places if step.inputs[place]):
                found = found or _rows_problem(self._weights[name], dtypes, dimensions)
        if found is None and step.op == "embedding":
            for name, least in zip(step.inputs[:2], (self._plan.vocab_size, self._plan.max_positions), strict=True):
                if name and self._weights[name].shape[0] < least:
                    return f"{name} has fewer than {least} rows"
        return found

    def _inputs(self, step: Step, op: Op) -> str | None:
        """Activations as wide as the op's formula wants them, and of the same rows."""
        given = [self._buffers[name] for name in step.inputs if name in self._buffers]
        tokens = op.of_tokens
        if any(each.rows is not (Rows.TOKENS if tokens else given[0].rows) for each in given):
            return "inputs must all count tokens or all count logit rows"
        for index, wanted in self._widths(step).items():
            name = step.inputs[index]
            found = self._buffers[name].cols if name in self._buffers else _width(self._weights, name)
            if name and found not in wanted:
                return (
                    f"input {op.inputs[index]}, {name}, has {found} columns, expected {' or '.join(map(str, wanted))}"
                )
        return None

    def _widths(self, step: Step) -> dict[int, tuple[int, ...]]:
        """Input → the columns (numbers of a vector) that it may have."""
        attrs, kv, cols = step.attrs, self._plan.kv, self._cols(step)
        first, made = cols[0] or 0, find_op(step.op).out_cols(cols, attrs)[0]
        match step.op:
            case "matmul":
                n, k = self._weights[step.inputs[1]].shape
                return {0: (k,), 2: (n,), 3: (made,)}
            case "rms_norm" | "layer_norm" | "add" | "activation":
                return {index: (first,) for index in range(1, len(step.inputs))}
            case "rope_kv_write":
                heads, dim = int(attrs["heads"]), kv.head_dim
                return {
                    0: ((heads + 2 * kv.kv_heads) * dim,),
                    1: tuple(range(2, dim + 1, 2)),
                    2: (dim, heads * dim),
                    3: (dim, kv.kv_heads * dim),
                }
            case "paged_attention":
                return {0: (int(attrs["heads"]) * kv.head_dim,)}
            case "embedding":
                return {1: (first,)}
            case "moe_gate_up":
                return {0: (self._weights[step.inputs[2]].shape[2],)}
            case "moe_down":
                slots = cols[1] or 0
                return {0: (slots * self._weights[step.inputs[3]].shape[2],), 2: (slots,)}
        return {}

    def _outputs(self, step: Step, op: Op) -> str | None:
        cols = self._cols(step)
        widths = op.out_cols(cols, step.attrs)
        first = next((self._buffers[name] for name in step.inputs if name in self._buffers), None)
        rows = op.rows or (first.rows if first else Rows.TOKENS)
        for name, width in zip(step.outputs, widths, strict=True):
            buffer = self._buffers.get(name)
            if buffer is not None and (buffer.cols, buffer.rows) != (width, rows):
                return f"its output {name} must be {width} columns of {rows.value}"
        if step.op == "moe_route" and int(step.attrs["per_token"]) > (cols[0] or 0):
            return f"{step.attrs['per_token']} experts of {cols[0]}"
        if step.op in ("moe_gate_up", "moe_down"):
            experts = self._weights[step.inputs[-1]].shape[0]
            return f"{cols[1]} experts of {experts}" if (cols[1] or 0) > experts else None
        return None

    def _apart(self, step: Step, op: Op) -> str | None:
        """A result lies apart from inputs and from other results, but where `in_place` lets it be an input's bytes."""
        outputs = [self._buffers.get(name) for name in step.outputs]
        for place, output in enumerate(outputs):
            if output is None:
                continue
            if any(other is not None and self._meet(output, other) for other in outputs[place + 1 :]):
                return f"its outputs {', '.join(step.outputs)} overlap"
            for index, name in enumerate(step.inputs):
                given = self._buffers.get(name)
                if given is None or not self._meet(output, given):
                    continue
                if not _same_place(output, given) or not _in_place(step.op, op, place, index):
                    return f"buffers {output.name} and {given.name} overlap"
        return None

    def _meet(self, one: Buffer, other: Buffer) -> bool:
        ends = (each.offset + buffer_bytes(self._plan, each) for each in (one, other))
        return next(ends) > other.offset and next(ends) > one.offset

    def _cols(self, step: Step) -> list[int | None]:
        """As `Op.out_cols` wants them: rows of a product's weight, columns of a table, numbers of a vector."""
        found: list[int | None] = []
        for index, name in enumerate(step.inputs):
            if name in self._buffers:
                found.append(self._buffers[name].cols)
            elif name in self._weights:
                shape = self._weights[name].shape
                found.append(shape[-2] if find_op(step.op).packed == index else shape[-1])
            else:
                found.append(None)
        return found


def _is_flag(value: object) -> bool:
    return value in (0, 1)


def _is_not_negative(value: object) -> bool:
    return isinstance(value, float) and value >= 0


def _is_between(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value <= high


def _width(weights: Mapping[str, Weight], name: str) -> int:
    return weights[name].shape[-1] if name else 0


def _same_place(one: Buffer, other: Buffer) -> bool:
    return dataclasses.replace(one, name="") == dataclasses.replace(other, name="")


def _in_place(name: str, op: Op, output: int, index: int) -> bool:
    """Elementwise ops and norms read an element before they write it, whichever input it is of."""
    return (output, index) in op.in_place or name in ("add", "activation", "softcap", "rms_norm", "layer_norm")


def _product_problem(weight: Weight, step: Step) -> str | None:
    """Of the packed weight of a product."""
    dimensions, gated = (2, bool(step.attrs["gated"])) if step.op == "matmul" else (3, step.op == "moe_gate_up")
    group, rounded = int(step.attrs["group"]), step.attrs["activations"] == "int8"
    if len(weight.shape) != dimensions or (gated and weight.shape[-2] % 2):
        return f"weight {weight.name} has the shape {weight.shape}"
    known = str(Precision(dtype=weight.dtype, group=group)) in PRECISIONS
    if not known or (rounded and not weight.dtype.is_quantised):
        return f"weight {weight.name} is {weight.dtype.value} in groups of {group}, for {step.attrs['activations']}"
    n, k = weight.shape[-2:]
    if weight.layout == ROW:  # of a plan for GPUs
        return _rows_problem(weight, (weight.dtype,), dimensions)
    layout, panels = panel_layout(weight.dtype, group) + (".gated" if gated else ""), num_panels(n, gated=gated)
    nbytes = panels * panel_bytes(k, weight.dtype, group) * (weight.shape[0] if dimensions > 2 else 1)
    if rounded and k > MAX_K:
        return f"K = {k} is too long for int8 activations"
    if (weight.layout, weight.pieces[-1].end, weight.nbytes) != (layout, panels, nbytes):
        return f"weight {weight.name} must be {panels} panels of layout {layout} in {nbytes} bytes"
    if gated and any(each.begin % 2 or each.end % 2 for each in weight.pieces):
        return f"a piece of weight {weight.name} parts gate from up"
    return None


def _rows_problem(weight: Weight, dtypes: Sequence[DType], dimensions: int) -> str | None:
    """Of a table or vector, or of a product whose rows lie as they are."""
    if weight.dtype not in dtypes or len(weight.shape) != dimensions or len(weight.pieces) != 1:
        return f"weight {weight.name} is {weight.dtype.value} of the shape {weight.shape}"
    nbytes = weight.shape[0] * row_bytes(math.prod(weight.shape[1:]), weight.dtype)
    layout = row_layout(weight.dtype)
    if (weight.layout, weight.pieces[0].end, weight.nbytes) != (layout, weight.shape[0], nbytes):
        return f"weight {weight.name} must be {weight.shape[0]} rows of layout {layout} in {nbytes} bytes"
    return None
