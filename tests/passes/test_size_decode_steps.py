"""Which decode steps are captured: the sizes that the plan lists, and what a plan may list."""

import dataclasses

import pytest

from ingot.builder.passes.size_decode_steps import size_decode_steps
from ingot.builder.pipeline import plan_passes
from ingot.errors import EngineError
from ingot.plan import Plan
from ingot.plan_check import check_plan
from ingot.plan_json import plan_from_json
from ingot.plugins.registry import find_target
from tests.builder.test_schedule import LAYER, plan_of
from tests.passes.test_split_contexts import plan as split_plan


def plan(batch: int, tokens: int = 64, rows: int = 64) -> Plan:
    made = split_plan()
    limits = dataclasses.replace(made.limits, max_batch_size=batch, max_num_tokens=tokens, max_logit_rows=rows)
    return dataclasses.replace(made, limits=limits)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (33, (1, 2, 4, 8, 16, 32, 33))]
)
def test_powers_of_two_and_the_largest_step(largest: int, sizes: tuple[int, ...]) -> None:
    for limited in (plan(largest), plan(64, tokens=largest), plan(64, rows=largest)):
        made, report = size_decode_steps(limited)
        assert made.decode_sizes == sizes
        assert (report.name, report.fired) == ("size_decode_steps", len(sizes))


def test_sizes_that_no_build_makes_are_refused() -> None:
    made, _ = size_decode_steps(plan_of(LAYER))
    assert made.decode_sizes == (1, 2, 4)
    assert plan_from_json(made.to_json()) == made
    for sizes in ((1, 1, 2), (4, 2), (1, 5)):
        with pytest.raises(EngineError, match=r"decode_sizes(.|\n)*larger and larger ones up to 4"):
            check_plan(dataclasses.replace(made, decode_sizes=sizes))


def test_only_gpu_targets_capture() -> None:
    for name, captures in (("cuda/sm80", True), ("tensorrt-rtx/sm89", True), ("cpu/avx2", False), ("ref", False)):
        assert (size_decode_steps in plan_passes(find_target(name))) is captures, name
