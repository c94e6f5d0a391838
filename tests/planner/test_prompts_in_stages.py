"""Prompts in pipeline stages: what `ingot plan` says of one alone, and what the real scheduler makes of it."""

import dataclasses
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.engine import read_plan
from ingot.planner.arrange import Candidate
from ingot.planner.cost import plan_cost
from ingot.planner.simulate import ReplicaOptions, simulate
from tests.e2e.test_tensor_parallel import made
from tests.planner.test_planner import MINE


def test_chunks_of_a_prompt_follow_each_other_through_stages(tmp_path: Path) -> None:
    """The formula and the simulation of the real scheduler agree, and the largest stage idles for one chunk."""
    build(BuildConfig(target="ref", max_batch_size=4, autotune=False), made(tmp_path, "llama"), tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    cost = plan_cost(plan)
    times = []
    for stages in (1, 2, 4):
        costs = (dataclasses.replace(cost, weights=1e9, row_operations=1e9, messages=0, sent_bytes=0),) * stages
        candidate = Candidate(device=MINE, precision="bf16", tp=1, pp=stages, plan=plan, stages=costs)
        limits = dataclasses.replace(plan.limits, max_input_len=6144, max_seq_len=6150, max_num_tokens=2048)
        options = ReplicaOptions(limits=limits, num_blocks=(1000,), tokens_per_block=plan.tokens_per_block)
        served = simulate([(6144, 1)], [0.0], candidate.clock(), options)
        assert served.ttft[0] == pytest.approx(candidate.prompt_seconds(6144), rel=0.02)
        times.append(served.ttft[0] / stages)  # of the same model
    whole, halves, quarters = times
    assert 0.5 * whole < halves < 0.58 * whole
    assert 0.25 * whole < quarters < 0.35 * whole
