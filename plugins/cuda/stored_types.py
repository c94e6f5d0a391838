"""In which types kernels keep activations: float32, or that of the products ("narrow") for what these alone read."""

from collections.abc import Mapping

from ingot.dtypes import DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import Buffer, Step
from ingot.plugins.registry import find_op


def check_types(step: Step, buffers: Mapping[str, Buffer], products: DType, *, narrow: bool) -> None:
    """Raise EngineError for a step that would read or write a type which its kernels do not know. products: their
    type; narrow: its kernels write their first output in that where the plan's buffer says so."""
    wide = {*(step.inputs[1:] if find_op(step.op).packed is not None else step.inputs)}
    wide |= {*(step.outputs[1:] if narrow else step.outputs)}
    for name in (*step.inputs, *step.outputs):
        allowed = (DType.F32,) if name in wide else tuple(dict.fromkeys((DType.F32, products)))
        if name in buffers and buffers[name].dtype not in allowed:
            raise EngineError(
                "an activation has a type that cuda targets do not store",
                where=f"kernel call {step.name}: {name}",
                expected=" or ".join(each.value for each in allowed),
                got=buffers[name].dtype.value,
                hint=REBUILD,
            )
