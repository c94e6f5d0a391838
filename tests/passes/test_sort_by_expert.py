"""Rows are sorted by expert once, for all matmuls of experts that read the same choice."""

import dataclasses

from ingot.builder.memory import Value
from ingot.builder.passes.sort_by_expert import SortByExpert
from ingot.builder.pipeline import input_passes
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.plan import Rows
from ingot.plugins.registry import find_target

EXPERTS = {"gate_up": 8, "down": 8, "other": 4}
SORT = SortByExpert(kernel="sort_by_expert.f32.sm80", experts=EXPERTS.__getitem__)


def gate_up(x: int, ids: int, y: int, weight: str = "gate_up") -> Draft:
    inputs = (x, ids, weight, None, None)
    return Draft(name=f"gate_up{y}", op="moe_gate_up", kernel="", inputs=inputs, outputs=(y,), attrs={})


def down(x: int, ids: int, y: int) -> Draft:
    inputs = (x, ids, ids, "down", None, None)
    return Draft(name=f"down{y}", op="moe_down", kernel="", inputs=inputs, outputs=(y,), attrs={})


def program(*steps: Draft, rows: Rows = Rows.TOKENS) -> Program:
    """Value 1 holds the choice: three experts of each row."""
    values = [Value(rows=rows, cols=3 if index == 1 else 8) for index in range(5)]
    return Program(steps=steps, values=tuple(values), logits=4)


def test_both_halves_of_the_experts_share_the_lists() -> None:
    made, report = SORT(program(gate_up(0, 1, 2), down(2, 1, 3), rows=Rows.LOGITS))
    assert [(step.name, step.inputs, step.outputs) for step in made.steps] == [
        ("gate_up2.sort_by_expert", (1,), (5,)),
        ("gate_up2", (0, 1, "gate_up", None, 5), (2,)),
        ("down3", (2, 1, 1, "down", None, 5), (3,)),
    ]
    assert made.values[5:] == (Value(rows=Rows.LOGITS, cols=15, dtype=DType.I32),)
    sort = made.steps[0]
    assert (sort.op, sort.kernel, sort.attrs) == ("sort_by_expert", "sort_by_expert.f32.sm80", {"experts": 8})
    assert (report.name, report.fired) == ("sort_by_expert", 1)
    assert report.refused == {"an earlier matmul reads them too": 1}


def test_every_choice_and_every_number_of_experts_has_lists_of_its_own() -> None:
    made, report = SORT(program(gate_up(0, 1, 2), gate_up(0, 3, 4), gate_up(0, 1, 3, "other")))
    assert [step.inputs[-1] for step in made.steps if step.op == "moe_gate_up"] == [5, 6, 7]
    assert [step.attrs["experts"] for step in made.steps if step.op == "sort_by_expert"] == [8, 8, 4]
    assert (report.fired, report.refused) == (3, {})


def test_other_steps_stay() -> None:
    plain = dataclasses.replace(gate_up(0, 1, 2), op="add", inputs=(0, 1))
    given = program(plain)
    made, report = SORT(given)
    assert made == given
    assert (report.fired, report.refused) == (0, {})


def test_it_runs_for_cuda_targets_alone() -> None:
    kernels = [
        each.kernel
        for each in input_passes(find_target("cuda/sm90"), lambda weight: (8, 2, 2))
        if isinstance(each, SortByExpert)
    ]
    assert kernels == ["sort_by_expert.f32.sm80"]
    for name in ("ref", "cpu/amx", "tensorrt-rtx/sm89"):
        assert input_passes(find_target(name), lambda weight: (8, 2, 2)) == ()
