"""`ingot plan`: costs are those of the plan, the formula and the simulation agree, what is refused is said."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.errors import ConfigError, UsageError
from ingot.planner.cost import plan_cost
from ingot.planner.device import Device, read_devices, step_seconds
from ingot.planner.simulate import simulate
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
        served = simulate(
            [(4, 3)] * count,
            [0.0, 0.5, 10.0, 10.0][:count],
            lambda past, new, rows: 1.0,
            limits=plan.limits,
            num_blocks=[num_blocks],
            tokens_per_block=size,
        )
        return served.ttft.tolist(), served.tpot.tolist(), served.seconds, served.steps

    assert run(8) == ([1.0, 1.5, 1.0], [1.0, 1.0, 1.0], 13.0, 7)
    assert run(1) == ([1.0, 3.5, 1.0], [1.0, 1.0, 1.0], 13.0, 9)  # room for one request at a time


@pytest.mark.slow
def test_the_command(checkpoint: Path) -> None:
    args = ("plan", "--checkpoint_dir", checkpoint, "--input_len", 40, "--output_len", 10, "--count", 2)
    mine = ("--devices", checkpoint.with_name("mine.toml"))
    report = json.loads(ingot(*args, *mine, "--json", "--rate", 20).succeeds().out)
    found = {(each["precision"], each["tp"]) for each in report["arrangements"]}
    assert found == {(name, tp) for name in ("bf16", "w8", "w4g128") for tp in (1, 2)}
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
    assert "not possible: l4, w8, tp 2: --tp_size 2 is not supported on cuda/sm89" in out


def test_what_is_not_possible_at_all_is_an_error(checkpoint: Path) -> None:
    args = ("plan", "--checkpoint_dir", checkpoint, "--devices", checkpoint.with_name("mine.toml"), "--output_len", 10)
    ingot(*args, "--input_len", 10**6).fails("no arrangement of these devices is possible", "max_seq_len", "positions")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "not valid TOML"),
        ("", "names no device"),
        (FILE + "colour = 1\n", "colour"),
        (FILE.replace("memory = 8e9", ""), "memory"),
        (FILE.replace("price = 2.0", "price = -1"), "price"),
        (FILE.replace("10e9", "0"), "bandwidth"),
        (FILE.replace("10e9", "nan"), "bandwidth"),
        (FILE.replace("10e9", '"fast"'), "bandwidth"),
        (FILE + "bytes_reached = 0\n", "bytes_reached"),
        (FILE.replace("{f32 = 1e11, bf16 = 1e11, int8 = 2e11}", "3"), "rates has a wrong value"),
        (FILE.replace("int8", "int7"), "int7"),
        (FILE.replace("rates = {f32 = 1e11, bf16 = 1e11, int8 = 2e11}", ""), "rates is missing"),
        ("device = 3\n", "tables"),
        ("x = " + 2000 * "[" + 2000 * "]", "not valid TOML"),
        ('[[device]]\nname = "a"\nlike = "h1000"\n', "did you mean 'h100'"),
        ('[[device]]\nname = "a"\nlike = 5\n', "like has a wrong value"),
    ],
)
def test_files_of_devices_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text)
    with pytest.raises((UsageError, ConfigError), match=words):
        read_devices(str(path))


def test_devices_by_name(tmp_path: Path) -> None:
    assert [each.name for each in read_devices("h100, l4")] == ["h100", "l4"]
    assert all(each.source for each in read_devices("h100,l4"))
    with pytest.raises(UsageError, match="there is no device"):
        read_devices("abacus")
    path = tmp_path / "d.toml"
    path.write_text('[[device]]\nname = "ours"\nlike = "h100"\nprice = 3\n')
    (device,) = read_devices(str(path))
    assert (device.name, device.price, device.bandwidth) == ("ours", 3, read_devices("h100")[0].bandwidth)
