"""A step has as many inputs, outputs and attributes as its op: kernels read that many, whatever the plan says."""

import dataclasses
from collections.abc import Iterator

import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Step
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import open_native
from ingot.plugins.registry import find_op
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import one_step_plan
from tests.plugins.cpu.test_kernels import CASES

pytestmark = pytest.mark.native


def _other_forms(step: Step) -> Iterator[Step]:
    """Each with one input, output or attribute more, less or absent."""
    optional = [name.endswith("?") for name in find_op(step.op).inputs]
    yield dataclasses.replace(step, inputs=step.inputs[:-1])
    yield dataclasses.replace(step, inputs=(*step.inputs, step.inputs[0]))
    yield dataclasses.replace(step, inputs=(*step.inputs, ""))
    for place, may_lack in enumerate(optional):
        if not may_lack:
            yield dataclasses.replace(step, inputs=(*step.inputs[:place], "", *step.inputs[place + 1 :]))
    yield dataclasses.replace(step, outputs=step.outputs[:-1])
    yield dataclasses.replace(step, outputs=(*step.outputs, step.outputs[0]))
    yield dataclasses.replace(step, attrs={**step.attrs, "more": 1.0})
    for key in step.attrs:
        left = {name: value for name, value in step.attrs.items() if name != key}
        yield dataclasses.replace(step, attrs=left)
        yield dataclasses.replace(step, attrs={**left, "other": step.attrs[key]})


@pytest.mark.parametrize("op", CASES)
def test_steps_of_another_form_are_refused(op: str) -> None:
    kernel = next(name for name in kernel_table() if name.startswith(f"{op}.") and name.endswith(".avx2"))
    inputs, attrs, batch = next(CASES[op](DType(kernel.split(".")[1])))
    plan, section = one_step_plan(kernel, inputs, attrs | ({"activations": "f32"} if op == "matmul" else {}), batch)
    (step,) = plan.steps
    options = SessionOptions(num_blocks=(64,), threads=1)
    open_native(plan, section, options, "avx2").close()
    for other in _other_forms(step):
        with pytest.raises(EngineError):
            open_native(dataclasses.replace(plan, steps=(other,)), section, options, "avx2")
