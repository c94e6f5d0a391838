"""Whether each step of a plan is a use of its op: types and sizes of inputs, attributes, places of results.

`plugins/cpu/execution/binder.h` checks the same for native sessions, and which kernels there are: both take the same
steps.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from ingot.dtypes import STORED, DType, Precision
from ingot.errors import REBUILD, EngineError
from ingot.plan import Buffer, Plan, Rows, Step, Weight
from ingot.plan_check import buffer_bytes
from ingot.plugins.f8_rows import INPUT_GROUPS
from ingot.plugins.layouts import ROW, num_panels, panel_bytes, panel_layout, row_bytes, row_layout
from ingot.plugins.op import Op
from ingot.plugins.quantised import MAX_K
from ingot.plugins.registry import find_op, op_names
from ingot.step_inputs import require_known_inputs
from ingot.weight_formats import TABLE_FORMAT

_TABLE_DTYPES = (DType.F32, DType.BF16, DType.F16, DType(TABLE_FORMAT.dtype))


def check_steps(plan: Plan, ranks: int = 1, stages: int = 1) -> None:
    """ranks: that compute the plan's collectives together; stages: that pass rows on.

    Raise EngineError for an input that nobody gives, or the first step that no session of any target could run.
    """
    require_known_inputs(plan)
    checker = _Checker(plan, ranks, stages)
    for step in plan.steps:
        if (found := checker.problem(step)) is not None:
            raise EngineError("the engine's plan is invalid", where=f"kernel call {step.name}", got=found, hint=REBUILD)


class _Checker:
    def __init__(self, plan: Plan, ranks: int, stages: int) -> None:
        self._plan, self._ranks, self._stages = plan, ranks, stages
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._weights = {weight.name: weight for weight in plan.weights}
        self._given = {each.name for each in plan.inputs}

    def problem(self, step: Step) -> str | None:
        """What is wrong with a step, or None."""
        op = find_op(step.op) if step.op in op_names() else None
        if op is None or not op.is_step:
            return f"op {step.op} cannot be computed by a kernel call"
        if (found := op.problem(step.inputs, step.attrs)) is not None:
            return found
        if op.collective is not None and step.attrs["ranks"] != self._ranks:
            return f"{step.attrs['ranks']} ranks compute it together, and {self._ranks} are here"
        if op.transfer is not None and step.attrs["stages"] != self._stages:
            return f"{step.attrs['stages']} pipeline stages compute the model, and {self._stages} are here"
        if len(step.outputs) != len(op.outputs) or (op.outputs and not step.outputs[0]):
            return f"gives {len(op.outputs)} outputs, got {len(step.outputs)}"
        checks: Sequence[Callable[[Step, Op], str | None]] = (
            self._cache,
            self._kinds,
            self._weights_of,
            self._inputs,
            self._outputs,
            self._apart,
        )
        return next((found for check in checks if (found := check(step, op)) is not None), None)

    def _cache(self, step: Step, op: Op) -> str | None:
        """An op that uses the KV cache names a layer of it, and that layer's own sizes."""
        if op.state is not None:
            return self._state(step, op.state(step.attrs))
        if not op.uses_kv:
            return None
        attrs, layer = step.attrs, int(step.attrs["layer"])
        kv = next((group for group in self._plan.caches if layer in group.layers), None)
        if kv is None:
            return f"layer {layer} of {self._plan.num_layers}"
        if kv.state:
            return f"layer {layer} keeps a state, no keys and values"
        if int(attrs.get("rank", 0)) != kv.latent:
            return f"values are the first {attrs.get('rank', 0)} numbers of keys, the cache has {kv.latent}"
        if (attrs["kv_heads"], attrs["head_dim"]) != (kv.kv_heads, kv.head_dim):
            return f"{attrs['kv_heads']} KV heads of {attrs['head_dim']}, the cache has {kv.kv_heads} of {kv.head_dim}"
        if kv.window and not 0 < int(attrs.get("window", kv.window)) <= kv.window:
            return f"the window must be within that of the cache group, {kv.window}"
        return None

    def _state(self, step: Step, size: int) -> str | None:
        """An op that keeps a state names a layer of as many numbers."""
        layer = int(step.attrs["layer"])
        group = next((each for each in self._plan.caches if layer in each.layers), None)
        if group is None or not group.state:
            return f"layer {layer} keeps no state"
        kept = group.state[group.layers.index(layer)]
        return None if kept == size else f"a state of {size} numbers, the cache group keeps {kept} in layer {layer}"

    def _kinds(self, step: Step, op: Op) -> str | None:
        """Weights where the op takes weights, buffers elsewhere."""
        constant = {op.packed, *op.tables, *op.vectors, *op.derived}
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
        found = None if op.packed is None else _product_problem(self._weights[step.inputs[op.packed]], step, op)
        for places, dtypes, dimensions in ((op.tables, _TABLE_DTYPES, 2), (op.vectors, (DType.F32,), 1)):
            for name in (step.inputs[place] for place in places if step.inputs[place]):
                found = found or _rows_problem(self._weights[name], dtypes, dimensions)
        for place, needed in op.tables.items():
            name, least = step.inputs[place], needed(self._plan)
            if found is None and name and self._weights[name].shape[0] < least:
                return f"{name} has fewer than {least} rows"
        return found

    def _inputs(self, step: Step, op: Op) -> str | None:
        """Activations that fit together as the op says, and of the same rows."""
        given = [self._buffers[name] for name in step.inputs if name in self._buffers]
        if any(each.rows is not (Rows.TOKENS if op.of_tokens else given[0].rows) for each in given):
            return "inputs must all count tokens or all count logit rows"
        return op.size_problem([self._shape(name) for name in step.inputs], step.attrs)

    def _outputs(self, step: Step, op: Op) -> str | None:
        widths = op.out_cols(self._cols(step, op), step.attrs)
        first = next((self._buffers[name] for name in step.inputs if name in self._buffers), None)
        rows = op.rows or (first.rows if first else Rows.TOKENS)
        for name, width in zip(step.outputs, widths, strict=True):
            buffer = self._buffers.get(name)
            if buffer is not None and (buffer.cols, buffer.rows) != (width, rows):
                return f"its output {name} must be {width} columns of {rows.value}"
        return None

    def _apart(self, step: Step, op: Op) -> str | None:
        """A result lies apart from inputs and from other results, unless `in_place` lets it be an input's."""
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
                if not _same_place(output, given) or not (op.overwrites or (place, index) in op.in_place):
                    return f"buffers {output.name} and {given.name} overlap"
        return None

    def _meet(self, one: Buffer, other: Buffer) -> bool:
        ends = (each.offset + buffer_bytes(self._plan, each) for each in (one, other))
        return next(ends) > other.offset and next(ends) > one.offset

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a weight as it is stored, (columns,) of an activation; None for what is neither."""
        if name in self._buffers:
            return (self._buffers[name].cols,)
        return self._weights[name].shape if name in self._weights else None

    def _cols(self, step: Step, op: Op) -> list[int | None]:
        """As `Op.out_cols` wants them: rows of a product's weight, columns of a table, numbers of a vector."""
        shapes = [self._shape(name) for name in step.inputs]
        return [shape[-2 if op.packed == index else -1] if shape else None for index, shape in enumerate(shapes)]


def _same_place(one: Buffer, other: Buffer) -> bool:
    return dataclasses.replace(one, name="") == dataclasses.replace(other, name="")


def _product_problem(weight: Weight, step: Step, op: Op) -> str | None:
    """What is wrong with the packed weight of a product."""
    dimensions, gated = 3 if op.experts or op.stacked else 2, op.gated(step.attrs)
    group, rounded = int(step.attrs["group"]), step.attrs["activations"] == "int8"
    if len(weight.shape) != dimensions or (gated and weight.shape[-2] % 2):
        return f"weight {weight.name} has the shape {weight.shape}"
    known = str(Precision(dtype=weight.dtype, group=group)) in STORED
    if step.attrs["activations"] == "fp8":
        known = known and weight.dtype is DType.F8 and group in INPUT_GROUPS
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
    """What is wrong with a table, a vector, or a product whose rows are not packed."""
    if weight.dtype not in dtypes or len(weight.shape) != dimensions or len(weight.pieces) != 1:
        return f"weight {weight.name} is {weight.dtype.value} of the shape {weight.shape}"
    nbytes = weight.shape[0] * row_bytes(math.prod(weight.shape[1:]), weight.dtype)
    layout, rows = row_layout(weight.dtype), weight.shape[-2 if dimensions > 2 else 0]  # of one expert
    if (weight.layout, weight.pieces[0].end, weight.nbytes) != (layout, rows, nbytes):
        return f"weight {weight.name} must be {rows} rows of layout {layout} in {nbytes} bytes"
    return None
