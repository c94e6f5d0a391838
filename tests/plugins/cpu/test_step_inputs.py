"""A native session gives steps the inputs that the plan lists, by name, and refuses every other one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr, Extent, Input, Plan
from ingot.plugins.cpu.session import open_native
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import one_step_plan, plain_batch

pytestmark = pytest.mark.native


def _listed(*inputs: Input) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, inputs=inputs)


def _input(**changes: Any) -> Callable[[Plan], Plan]:
    """The first input is another one."""
    return lambda plan: _listed(dataclasses.replace(plan.inputs[0], **changes), *plan.inputs[1:])(plan)


def _read(index: int, name: str) -> Callable[[Plan], Plan]:
    """The step reads something else there."""

    def change(plan: Plan) -> Plan:
        inputs = list(plan.steps[0].inputs)
        inputs[index] = name
        return dataclasses.replace(plan, steps=(dataclasses.replace(plan.steps[0], inputs=tuple(inputs)),))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_listed(), "the plan lists no input query_starts"),
        (_read(3, "positions"), 'input 3 must be query_starts, got "positions"'),
        (_read(5, "in0"), 'input 5 must be block_tables, got "in0"'),
        (_read(4, ""), 'input 4 must be past_lengths, got ""'),
        (_input(name="adapters"), r"asks for the input adapters \(i32 by sequence_bounds\)"),
        (_input(dtype=DType.I64), r"asks for the input query_starts \(i64 by"),
        (_input(extent=Extent.TOKENS), r"asks for the input query_starts \(i32 by tokens\)"),
        (_input(name="in0"), "two are called in0"),
    ],
)
def test_other_inputs_are_refused(change: Callable[[Plan], Plan], words: str) -> None:
    attrs: dict[str, Attr] = {"layer": 0, "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": 0.5}
    attrs |= {"window": 0, "softcap": 0.0, "bf16_bias": 0, "growth": 0.0, "growth_every": 1}
    plan, section = one_step_plan(
        "paged_attention.f32.avx2", [np.ones((4, 8), np.float32), None], attrs, plain_batch(4)
    )
    options = SessionOptions(num_blocks=(8,), threads=1)
    open_native(plan, section, options, "avx2").close()
    with pytest.raises(EngineError, match=words):
        open_native(change(plan), section, options, "avx2")
