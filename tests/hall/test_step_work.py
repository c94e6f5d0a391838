"""What a step must move and compute, held against counting by hand."""

import dataclasses
from pathlib import Path

import pytest

from ingot.bench.bytes_read import best_rows, weight_bytes_per_step
from ingot.bench.timing import GREEDY
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.sampling import SamplingParams
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.plan import Buffer, Plan, Rows, Step
from ingot.plugins.plan_work import PlanWork
from ingot.step_work import Load, Work
from tests.handmade import TINY_LLAMA, write_model


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """4 heads and 2 KV heads of 12, hidden size 32, gate and up of 44, 61 tokens; KV cache in float32."""
    work = tmp_path_factory.mktemp("plan")
    convert(ConvertOptions(model_dir=write_model(work / "m", TINY_LLAMA), output_dir=work / "c"))
    build(BuildConfig(target="ref", precision="f32"), work / "c", work / "e")
    return read_plan(work / "e")


def _step(plan: Plan, name: str) -> Step:
    return next(step for step in plan.steps if step.name == name)


def test_a_product_reads_its_weight_once_for_all_rows(plan: Plan) -> None:
    found = PlanWork(plan).of(_step(plan, "layers.0/gate_up"), Load(sequences=[(0, 5), (9, 2)], logit_rows=2))
    assert found == Work(nbytes=4 * (96 * 32 + 7 * (32 + 44)), operations=2 * 7 * 88 * 32)


def test_logits_are_made_for_the_rows_that_want_them(plan: Plan) -> None:
    head = _step(plan, "lm_head")
    assert PlanWork(plan).of(head, Load(sequences=[(0, 5), (9, 2)], logit_rows=2)).operations == 2 * 2 * 61 * 32
    assert PlanWork(plan).of(head, Load(sequences=[(0, 5)], logit_rows=0)) == Work(nbytes=0, operations=0)


@pytest.mark.parametrize("window", [0, 1, 3, 8, 100])
@pytest.mark.parametrize("sequences", [[(0, 1)], [(0, 9)], [(4, 1), (10, 1)], [(2, 7), (20, 3)]])
def test_attention_counts_what_each_token_sees(plan: Plan, window: int, sequences: list[tuple[int, int]]) -> None:
    attention = _step(plan, "layers.1/attention")
    attention = dataclasses.replace(attention, attrs={**attention.attrs, "window": window})
    seen = [
        [set(range(max(0, past + i + 1 - window) if window else 0, past + i + 1)) for i in range(count)]
        for past, count in sequences
    ]
    pairs = sum(len(tokens) for one in seen for tokens in one)
    read = sum(len(set.union(*one)) for one in seen)
    tokens = sum(count for _, count in sequences)
    found = PlanWork(plan).of(attention, Load(sequences=sequences, logit_rows=1))
    assert found.operations == 4 * pairs * 48
    assert found.nbytes == read * (2 * 12 + 2 * 16) * 4 + tokens * 2 * 48 * 4  # values are padded to 16 dims


def test_an_embedding_reads_one_row_per_token(plan: Plan) -> None:
    found = PlanWork(plan).of(_step(plan, "embed"), Load(sequences=[(0, 3)], logit_rows=1))
    assert found.nbytes == 3 * (32 * 4 + 32 * 4)


def test_new_keys_and_values_are_written(plan: Plan) -> None:
    step = _step(plan, "layers.0/rope_kv_write")
    one, two = (PlanWork(plan).of(step, Load(sequences=[(0, count)], logit_rows=1)).nbytes for count in (1, 2))
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    touched = sum(cols[name] for name in (*step.inputs, *step.outputs) if name in cols)
    assert two - one == 4 * touched + (2 * 12 + 2 * 16) * 4


def test_queries_that_attention_rotates_are_no_work_of_the_step_before_it(plan: Plan) -> None:
    step, work = _step(plan, "layers.0/rope_kv_write"), PlanWork(plan)
    load = Load(sequences=[(0, 3)], logit_rows=1)
    whole, rest = (work.of(step, load, inside) for inside in ((), (step.name,)))
    assert whole.nbytes - rest.nbytes == 3 * 2 * 48 * 4  # read and written
    assert (whole.operations, rest.operations) == (2 * 3 * 48, 2 * 3 * 24)


def test_experts_are_read_where_some_row_takes_them(plan: Plan) -> None:
    gate_up = _step(plan, "layers.0/gate_up")
    weight = next(weight for weight in plan.weights if weight.name == gate_up.inputs[1])
    experts = dataclasses.replace(weight, shape=(20, *weight.shape), nbytes=20 * weight.nbytes)
    slots = Buffer(name="ids", rows=Rows.TOKENS, cols=4, offset=0)
    step = dataclasses.replace(gate_up, op="moe_gate_up", inputs=(gate_up.inputs[0], "ids", weight.name))
    changed = dataclasses.replace(plan, weights=(experts,), buffers=(*plan.buffers, slots))
    found = PlanWork(changed).of(step, Load(sequences=[(0, 2)], logit_rows=1))
    assert found.operations == 2 * 2 * 4 * 88 * 32
    assert found.nbytes == round(20 * (1 - 0.8**2) * weight.nbytes) + 4 * 2 * (32 + 4 + 44)


def test_draws_read_the_logits(plan: Plan) -> None:
    assert PlanWork(plan).draw_work(Load(sequences=[(3, 1)] * 4, logit_rows=4)).nbytes == 4 * 4 * 61


def test_a_screened_product_reads_half_where_the_best_tokens_are_enough(tmp_path: Path) -> None:
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", TINY_LLAMA), output_dir=tmp_path / "c"))
    config = BuildConfig(target="ref", precision="w8", activations="int8", screen_lm_head=True)
    build(config, tmp_path / "c", tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    work, head = PlanWork(plan), plan.steps[-1]
    full, best = (Load(sequences=[(3, 1)] * 2, logit_rows=2, best_only=way) for way in (False, True))
    # panels of 16 columns: scales and sums, multipliers of a group (w4), codes of 32 inputs padded to 64 and to 128
    full_panel, half_panel, dither = 128 + 16 * 64, 128 + 64 + 16 * 128 // 2, 4 * 32
    assert work.of(head, full).nbytes == 4 * full_panel + 4 * 2 * (32 + 61)
    assert work.of(head, best).nbytes == 4 * half_panel + dither + 4 * 2 * (32 + 61) + 2 * 4 * 2 * 61
    assert work.of(plan.steps[0], best) == work.of(plan.steps[0], full)
    five = Load(sequences=[(3, 1)] * 5, logit_rows=5, best_only=True)
    assert work.of(head, five).nbytes == 4 * full_panel + 4 * 5 * (32 + 61)
    whole, some, many = (weight_bytes_per_step(plan, best_rows=rows) for rows in (0, 4, 5))
    assert whole == many
    assert whole - some == 4 * (full_panel - half_panel) - dither
    for sampling, requests, rows in (
        (GREEDY, 5, 5),
        (SamplingParams(temperature=0, max_tokens=9), 2, 2),
        (SamplingParams(temperature=0, logprobs=1), 1, 0),
        (SamplingParams(temperature=0.5), 1, 0),
    ):
        assert best_rows(sampling, requests) == rows
