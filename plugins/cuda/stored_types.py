"""In which types kernels keep activations: float32, or that of the products ("narrow") for what these alone read."""

from collections.abc import Mapping

from ingot.dtypes import DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import Buffer, Step
from ingot.plugins.cuda.plan_facts import takes_fp8
from ingot.plugins.registry import find_op


def check_types(step: Step, buffers: Mapping[str, Buffer], products: DType, *, narrow: bool) -> None:
    """Raise EngineError for a step that would read or write a type which its kernels do not know. products: their
    type, which they take unless they multiply FP8; narrow: its kernels write their first output in that where the
    plan's buffer says so."""
    op = find_op(step.op)
    wide = {*(step.inputs[1:] if op.packed is not None else step.inputs)}
    wide |= {*(step.outputs[1:] if narrow else step.outputs)}
    for name in (*step.inputs, *step.outputs):
        allowed = [DType.F32] if name in wide else [*dict.fromkeys((DType.F32, products))]
        if op.packed is not None and name == step.inputs[0]:
            allowed = [DType.F8] if takes_fp8(step) else [products]
        if op.rounds and name == step.outputs[0]:
            allowed = [each for each in allowed if each.value == step.attrs["to"]] if "to" in op.attrs else [DType.F8]
        if (op.lists and name == step.outputs[0]) or (op.listed is not None and name == step.inputs[op.listed]):
            allowed = [DType.I32]
        if name in buffers and buffers[name].dtype not in allowed:
            raise EngineError(
                "an activation has a type that cuda targets do not store",
                where=f"kernel call {step.name}: {name}",
                expected=" or ".join(each.value for each in allowed) or "another buffer",
                got=buffers[name].dtype.value,
                hint=REBUILD,
            )
