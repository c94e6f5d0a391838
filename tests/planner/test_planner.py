"""`ingot plan`: costs are those of the plan, the formula and the simulation agree, what is refused is said."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.planner.arrange import Arrangement, Candidate, Goals, RatePoint, Simulation, arrangements
from ingot.planner.clock import Clock, stages_clock
from ingot.planner.cost import plan_cost
from ingot.planner.device import Device, Float64, decode_seconds, read_devices, step_seconds
from ingot.planner.make_plan import PlanOptions, _best, _candidate, _simulate
from ingot.planner.plot import curves
from ingot.planner.simulate import ReplicaOptions, simulate
from ingot.planner.virtual import VirtualSession
from ingot.plugins.plan_work import PlanWork
from ingot.quickstart import SHIPPED
from ingot.step_work import Load
from tests.e2e.command import ingot
from tests.e2e.test_tensor_parallel import made

MINE = Device(
    name="mine",
    target="ref",
    memory=8e9,
    bandwidth=10e9,
    rates={"f32": 1e11, "bf16": 1e11},
    layer_seconds=1e-5,
    request_seconds=1e-6,
    link_bandwidth=1e9,
)
FILE = """
[[device]]
name = "mine"
target = "cpu/avx2"
memory = 8e9
bandwidth = 10e9
rates = {f32 = 1e11, bf16 = 1e11, int8 = 2e11}
price = 2.0
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=folder / "c"))
    (folder / "mine.toml").write_text(FILE)
    return folder / "c"


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "gpt_oss"])
def test_the_cost_of_a_plan_is_what_its_steps_move_and_compute(name: str, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", precision="f32", autotune=False), made(tmp_path, name), tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    cost, work = plan_cost(plan), PlanWork(plan)
    per_second = dataclasses.replace(
        MINE, bandwidth=1.0, rates={"f32": 1e30, "bf16": 1e30}, bytes_reached=1, layer_seconds=0, request_seconds=0
    )
    for sequences in ([(20, 1)], [(20, 1)] * 3, [(0, 9)]):
        load = Load(sequences=sequences, logit_rows=len(sequences), best_only=True)
        past, new = (np.array(each, np.int64) for each in zip(*sequences, strict=True))
        found = step_seconds(cost, per_second, 1, past, new, len(sequences)).total
        assert found == pytest.approx(sum(work.of(step, load).nbytes for step in plan.steps), rel=0.1)
        counted = dataclasses.replace(per_second, bandwidth=1e30, rates={"f32": 1.0, "bf16": 1.0}, operations_reached=1)
        found = step_seconds(cost, counted, 1, past, new, len(sequences)).total
        assert found == pytest.approx(sum(work.of(step, load).operations for step in plan.steps), rel=0.15)


def test_ranks_share_the_work_and_meet(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "llama")
    costs = []
    for ranks in (1, 2):
        build(BuildConfig(target="ref", tp_size=ranks, autotune=False), checkpoint, tmp_path / f"e{ranks}")
        costs.append(plan_cost(read_plan(tmp_path / f"e{ranks}")))
    whole, share = costs
    assert whole.collectives == 0
    assert share.collectives == 2 * share.layers
    assert 0.5 <= share.weights / whole.weights < 0.7
    assert share.sequence_bytes(10) == whole.sequence_bytes(10) / 2
    past, new = np.array([5], np.int64), np.array([1], np.int64)
    assert step_seconds(share, MINE, 2, past, new, 1).parts[2] > 0
    assert step_seconds(whole, MINE, 1, past, new, 1).parts[2] == 0


def test_more_bandwidth_is_never_slower(checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", autotune=False), checkpoint, tmp_path / "e")
    cost = plan_cost(read_plan(tmp_path / "e"))
    past, new = np.array([100, 0], np.int64), np.array([1, 50], np.int64)
    last = float("inf")
    for factor in (1, 2, 8, 64):
        found = step_seconds(cost, dataclasses.replace(MINE, bandwidth=factor * 1e9), 1, past, new, 2).total
        assert found <= last
        last = found


def test_the_simulation_runs_the_real_scheduler(checkpoint: Path, tmp_path: Path) -> None:
    """Steps of a second each: what requests see can be counted by hand."""
    build(BuildConfig(target="ref", max_batch_size=2, autotune=False), checkpoint, tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    size = plan.tokens_per_block

    def run(num_blocks: int, count: int = 3) -> tuple[list[float], list[float], float, int]:
        options = ReplicaOptions(limits=plan.limits, num_blocks=(num_blocks,), tokens_per_block=size)
        clock = Clock(step=lambda past, new, rows: [1.0])
        served = simulate([(4, 3)] * count, [0.0, 0.5, 10.0, 10.0][:count], clock, options)
        return served.ttft.tolist(), served.tpot.tolist(), served.seconds, served.steps

    assert run(8) == ([1.0, 1.5, 1.0], [1.0, 1.0, 1.0], 13.0, 7)
    assert run(1) == ([1.0, 3.5, 1.0], [1.0, 1.0, 1.0], 13.0, 9)  # room for one request at a time

    options = ReplicaOptions(limits=plan.limits, num_blocks=(8,), tokens_per_block=size)
    clock = Clock(step=lambda past, new, rows: [1.0], call=0.5)
    together = dataclasses.replace(clock, decode=lambda batches, steps: np.ones((1, len(batches), steps)))
    found = [simulate([(4, 3)], [0.0], each, options) for each in (clock, together)]
    assert [(each.seconds, each.steps) for each in found] == [(4.5, 3), (4.0, 3)], "two decode steps in one call"


def test_several_decode_steps_at_once_are_those_steps(tmp_path: Path) -> None:
    """The time of each, and what requests see of them."""
    checkpoint = made(tmp_path, "gemma3_text")  # with windows
    build(BuildConfig(target="ref", max_batch_size=4, autotune=False), checkpoint, tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    cost, past = plan_cost(plan), np.array([3, 9, 40], np.int64)
    ones = np.ones(3, np.int64)
    singly = [step_seconds(cost, MINE, 2, past + turn, ones, 3).total for turn in range(9)]
    found = decode_seconds([cost, cost], MINE, 2, [past.tolist()], 9)
    assert found[:, 0] == pytest.approx(np.array([singly, singly]), rel=1e-12)

    clock = stages_clock([cost], MINE, 1)
    options = ReplicaOptions(
        limits=plan.limits,
        num_blocks=plan.in_each(64),
        tokens_per_block=plan.tokens_per_block,
        windows=tuple(group.window for group in plan.caches),
    )
    random = np.random.default_rng(1)
    lengths = [(int(random.integers(1, 20)), int(random.integers(1, 25))) for _ in range(30)]
    arrivals = np.cumsum(random.exponential(3e-4, 30)).tolist()
    one = simulate(lengths, arrivals, dataclasses.replace(clock, decode=None), options, replicas=2)
    several = simulate(lengths, arrivals, clock, options, replicas=2)
    assert several.ttft == pytest.approx(one.ttft, rel=1e-9)
    assert several.tpot == pytest.approx(one.tpot, rel=1e-9, nan_ok=True)
    assert (several.steps, several.tokens) == (one.steps, one.tokens)
    assert several.busy == pytest.approx(one.busy)


def test_stages_work_at_different_steps_at_once(checkpoint: Path, tmp_path: Path) -> None:
    """Two stages of a second and of two: counted by hand. With two requests the second stage never idles."""
    build(BuildConfig(target="ref", max_batch_size=4, autotune=False), checkpoint, tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    options = ReplicaOptions(limits=plan.limits, num_blocks=(16,), tokens_per_block=plan.tokens_per_block)
    clock = Clock(step=lambda past, new, rows: [1.0, 2.0], stages=2)
    alone = simulate([(4, 3)], [0.0], clock, options)
    assert (alone.ttft.tolist(), alone.tpot.tolist(), alone.seconds) == ([3.0], [3.0], 9.0)

    def decode(batches: Sequence[Sequence[int]], steps: int) -> Float64:
        return np.tile(np.array([1.0, 2.0])[:, None, None], (1, len(batches), steps))

    ahead = dataclasses.replace(clock, decode=decode)
    again = simulate([(4, 3)], [0.0], ahead, options)
    assert (again.ttft.tolist(), again.tpot.tolist(), again.seconds) == ([3.0], [3.0], 9.0)
    for each in (clock, ahead):
        both = simulate([(4, 3)] * 2, [0.0, 0.0], each, options)
        assert (both.ttft.tolist(), both.tpot.tolist(), both.seconds) == ([3.0, 5.0], [4.0, 4.0], 13.0)


@pytest.mark.parametrize(
    ("stages", "blocks", "count"),
    [
        (3, 64, 20),
        *(pytest.param(stages, blocks, 60, marks=pytest.mark.slow) for stages in (2, 8) for blocks in (12, 64)),
    ],
)
def test_stages_that_go_round_are_simulated_at_once(stages: int, blocks: int, count: int, tmp_path: Path) -> None:
    """The same steps as one by one: with windows, with unequal stages, with requests that come together and alone, with
    room for few requests and for all."""
    build(BuildConfig(target="ref", max_batch_size=12, autotune=False), made(tmp_path, "gemma3_text"), tmp_path / "e")
    plan = read_plan(tmp_path / "e")
    cost = plan_cost(plan)
    costs = [dataclasses.replace(cost, weights=cost.weights * (1 + stage % 3)) for stage in range(stages)]
    clock = stages_clock(costs, MINE, 1)
    options = ReplicaOptions(
        limits=dataclasses.replace(plan.limits, max_num_tokens=32),
        num_blocks=plan.in_each(blocks),
        tokens_per_block=plan.tokens_per_block,
        windows=tuple(group.window for group in plan.caches),
    )
    random = np.random.default_rng(stages)
    lengths = [(int(random.integers(1, 60)), int(random.integers(1, 60))) for _ in range(count)]
    gaps = random.exponential(sum(clock.step(np.array([9]), np.array([1]), 1)) * 4, count)
    arrivals = np.cumsum(np.where(random.random(count) < 0.3, 0.0, gaps)).tolist()
    with mock.patch.object(VirtualSession, "announce", autospec=True, side_effect=VirtualSession.announce) as single:
        one = simulate(lengths, arrivals, dataclasses.replace(clock, decode=None), options, replicas=2)
        calls = single.call_count
        several = simulate(lengths, arrivals, clock, options, replicas=2)
    assert several.ttft == pytest.approx(one.ttft, rel=1e-9)
    assert several.tpot == pytest.approx(one.tpot, rel=1e-9, nan_ok=True)
    assert (several.steps, several.tokens, several.preemptions) == (one.steps, one.tokens, one.preemptions)
    assert several.busy == pytest.approx(one.busy)
    if blocks == 64:  # else somebody always waits for room, and each step decides
        assert single.call_count - calls < calls / 2, "most steps are not announced one by one"


def test_stages_share_the_work_and_pass_rows_on(tmp_path: Path) -> None:
    checkpoint = made(tmp_path, "llama")
    for stages in (1, 2):
        config = BuildConfig(target="ref", pp_size=stages, autotune=False)
        build(config, checkpoint, tmp_path / f"e{stages}")
    whole = plan_cost(read_plan(tmp_path / "e1"))
    last, first = (plan_cost(read_plan(tmp_path / "e2", rank)) for rank in range(2))
    assert first.layers + last.layers == whole.layers
    assert whole.messages == last.messages == 0 < first.messages
    assert first.sent_bytes > 0
    assert (first.draws, last.draws) == (False, True)
    assert first.weights + last.weights == pytest.approx(whole.weights, rel=0.05)
    past, new = np.array([5], np.int64), np.array([1], np.int64)
    assert step_seconds(first, MINE, 1, past, new, 1).parts[2] > 0, "the message"


def test_arrangements_with_stages_and_with_prompts_apart(checkpoint: Path, tmp_path: Path) -> None:
    build(BuildConfig(target="ref", pp_size=2, autotune=False), checkpoint, tmp_path / "e")
    plans = [read_plan(tmp_path / "e", rank) for rank in (1, 0)]
    stages = tuple(map(plan_cost, plans))
    two = Candidate(device=MINE, precision="bf16", tp=1, pp=2, plan=plans[1], stages=stages)
    goals = Goals(input_len=40, output_len=20, count=4)
    by_batch = {each.batch: each for each in arrangements(goals, two, can_be_apart=False)}
    assert all(each.replicas == 2 for each in by_batch.values())
    step = [each.total for each in two.step(1, 50, 2)]
    assert by_batch[1].tpot_ms == pytest.approx(1e3 * sum(step)), "one request is in one stage at a time"
    assert by_batch[2].tpot_ms == pytest.approx(1e3 * max(sum(step), 2 * max(step))), "two are in both"
    assert two.most_batch(60) <= min(int(0.9 * MINE.memory / each.sequence_bytes(60)) for each in stages)
    whole = dataclasses.replace(two, pp=1, stages=stages[:1])
    apart = [each for each in arrangements(goals, whole, can_be_apart=True) if each.prefill_replicas]
    assert apart
    assert all(each.prefill_replicas + each.replicas == 4 for each in apart)
    one = next(each for each in apart if each.batch == 8)
    prompt, decode = whole.prompt_seconds(40), whole.step(8, 50, 0)[0].total
    rates = one.prefill_replicas / prompt, one.replicas * 8 / (decode * 20)
    assert one.output_tokens_per_second == pytest.approx(20 * min(rates))
    assert one.tpot_ms == pytest.approx(1e3 * decode), "no prompt delays a token"


@pytest.mark.slow
def test_the_command(checkpoint: Path) -> None:
    args = ("plan", "--checkpoint_dir", checkpoint, "--input_len", 40, "--output_len", 10, "--count", 2)
    mine = ("--devices", checkpoint.with_name("mine.toml"))
    report = json.loads(ingot(*args, *mine, "--json", "--rate", 20).succeeds().out)
    found = {(each["precision"], each["tp"], each["pp"], each["prefill_replicas"]) for each in report["arrangements"]}
    layouts = ((1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1))
    assert found == {(name, *layout) for name in ("bf16", "w8", "w4g128") for layout in layouts}
    assert all(each["simulation"] for each in report["arrangements"][:3])
    first, *_, last = report["arrangements"]
    assert 0 < first["cost"] <= last["cost"]
    assert first["simulation"]["requests"] >= 32
    speed = first["simulation"]["output_tokens_per_second"]
    assert 0.5 * 20 * 10 < speed < 1.5 * 20 * 10, "as many requests come"
    out = ingot(*args, *mine, "--tpot", 1e-6, "--precision", "w8").succeeds().out
    assert "misses the goals" in out
    assert "nothing ran on these devices" in out
    out = ingot(*args, *mine, "--rate", 1e9, "--precision", "w8").succeeds().out
    assert "misses the goals" in out
    out = ingot(*args, "--devices", "l4", "--precision", "w8").succeeds().out
    assert re.search(r"^l4 +w8 +2 +1 ", out, re.MULTILINE), "two ranks on two GPUs"


@pytest.mark.slow
def test_a_plot_over_rates(checkpoint: Path, tmp_path: Path) -> None:
    """With more requests, tokens cost less and come later, until no more can be served."""
    args = ("plan", "--checkpoint_dir", checkpoint, "--input_len", 40, "--output_len", 10, "--count", 2)
    mine = ("--devices", checkpoint.with_name("mine.toml"), "--precision", "w8", "--ttft", 50, "--json")
    with mock.patch.dict("sys.modules", {"matplotlib": None}):
        ingot(*args, *mine, "--plot", tmp_path / "p.png").fails("--plot needs matplotlib", code=2)
    ingot(*args, *mine, "--plot", tmp_path / "absent/p.png").fails("no directory", code=2)
    report = json.loads(ingot(*args, *mine, "--plot", tmp_path / "p.png").succeeds().out)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    drawn = [each for each in report["arrangements"] if each["curve"]]
    assert len(drawn) == 3
    for each in drawn:
        rates = [point["rate"] for point in each["curve"]]
        most = each["output_tokens_per_second"] / 10
        assert (rates[0], rates[-1]) == pytest.approx((0.1 * most, 1.2 * most))
        first, last = each["curve"][0], each["curve"][-1]
        assert first["simulation"]["ttft_ms_p90"] < last["simulation"]["ttft_ms_p90"]
        assert first["cost"] > 2 * last["cost"]
        for point in (first, last):
            speed = point["simulation"]["output_tokens_per_second"]
            assert point["cost"] * speed == pytest.approx(each["cost"] * each["output_tokens_per_second"])
    made = [read_arrangement(each) for each in drawn]
    assert [line for _, line in curves(made[0], "ttft")] == ["-", "--"]
    assert [len(values) for values, _ in curves(made[0], "cost")] == [len(made[0].curve)]


def read_arrangement(document: dict[str, Any]) -> Arrangement:
    points = tuple(
        RatePoint(rate=each["rate"], simulation=Simulation(**each["simulation"]), cost=each["cost"])
        for each in document["curve"]
    )
    return Arrangement(**{**document, "simulation": None, "curve": points})


@pytest.mark.slow
def test_all_replicas_for_a_while(checkpoint: Path) -> None:
    """As many requests as come in that time, shared by the replicas; also with prompts apart."""
    args = ("plan", "--checkpoint_dir", checkpoint, "--input_len", 40, "--output_len", 10, "--count", 3)
    mine = ("--devices", checkpoint.with_name("mine.toml"), "--precision", "w8")
    ingot(*args, *mine, "--simulated_seconds", 5).fails("--simulated_seconds needs --rate", code=2)
    report = json.loads(ingot(*args, *mine, "--rate", 40, "--simulated_seconds", 5, "--json").succeeds().out)
    first, *others = report["arrangements"]
    assert (first["simulation"]["requests"], first["simulation"]["replicas"]) == (200, first["replicas"])
    assert 4 < first["simulation"]["seconds"] < 8
    assert not any(each["simulation"] for each in others)


@pytest.mark.slow
def test_prompts_apart_are_simulated(checkpoint: Path) -> None:
    """Long prompts and few tokens: no token waits for a prompt, and the first one comes after the keys and values."""
    options = PlanOptions(
        checkpoint_dir=checkpoint,
        devices=tuple(read_devices(str(checkpoint.with_name("mine.toml")))),
        input_len=200,
        output_len=8,
        count=4,
        rate=60,
        precisions=("w8",),
    )
    candidate = _candidate(options, Checkpoint.open(checkpoint), options.devices[0], "w8", 1, 1)
    made = _best(options, candidate, can_be_apart=True)
    together, apart = (next(each for each in made if bool(each.prefill_replicas) == kind) for kind in (False, True))
    found = [_simulate(options, each, candidate, lambda what, done, total: None) for each in (together, apart)]
    assert found[1].replicas == apart.replicas
    assert found[1].ttft_ms_p50 > 1e3 * (candidate.prompt_seconds(200) + candidate.handed_seconds(200))
    tails = [each.tpot_ms_p90 or 0.0 for each in found]
    assert tails[1] < tails[0]


def test_what_is_not_possible_at_all_is_an_error(checkpoint: Path) -> None:
    args = ("plan", "--checkpoint_dir", checkpoint, "--devices", checkpoint.with_name("mine.toml"), "--output_len", 10)
    ingot(*args, "--input_len", 10**6).fails("no arrangement of these devices is possible", "max_seq_len", "positions")
