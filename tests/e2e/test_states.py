"""A model whose layers keep states: the same bits in chunks, in company, after prefix hits and preemption, on every
target that runs here; what its states take of memory; quantised engines beside the exact one.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.runtime import Policy, RuntimeConfig
from ingot.convert.families import (
    falcon_h1,
    granitemoehybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    nemotron_h,
    qwen3_5_moe_text,
    qwen3_next,
)
from ingot.convert.families.qwen3_5_text import FAMILY
from ingot.convert.family import Family
from ingot.engine import read_plan
from ingot.inspect import inspect
from ingot.plan import STATE_SLOTS, STATE_WINDOW
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.runtime.memory import snapshot_stride
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import Request
from tests.e2e.same_bits import (
    COLD,
    HEADS,
    OWN_KERNELS,
    RUNNABLE,
    SIZE,
    build_for_all,
    check_chunks,
    opened,
    prompts_of,
    random_checkpoint,
)
from tests.runtime.test_bit_identity import everything, generations
from tests.runtime.tiny_engine import make_loop, open_session, poisoned_runner
from tests.runtime.tiny_plan import TinyModel

LONGEST = 200
POOLS = (60, 60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("states"), {**FAMILY.tiny, "max_position_embeddings": 256})


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    return build_for_all(checkpoint, checkpoint.parent / "e", "f32", LONGEST)


@pytest.fixture(params=OWN_KERNELS["f32"])
def target(request: pytest.FixtureRequest) -> Target:
    return find_target(request.param)


@pytest.fixture
def model(engine: Path, target: Target) -> TinyModel:
    return opened(engine, target)


@pytest.mark.slow
def test_chunks_and_company_change_no_bit(model: TinyModel, target: Target) -> None:
    check_chunks(model, target, POOLS)


@pytest.mark.slow
def test_a_prefix_hit_at_any_boundary_changes_no_bit(model: TinyModel, target: Target) -> None:
    """The second prompt parts from the first one there and leaves a snapshot, from which the third one begins."""
    for head in HEADS:
        prompts = prompts_of(5, 11, 3, head=head)
        calm = []
        for prompt in prompts:
            with poisoned_runner(model, target, POOLS, config=COLD) as runner:
                calm += generations(runner, [prompt])
        with poisoned_runner(model, target, POOLS, seed=head) as runner:
            found = [generations(runner, [prompt])[0] for prompt in prompts]
            assert found == calm, f"{head} tokens in common"
            hits = runner.stats()["prefix_hit_tokens"]
        with poisoned_runner(model, target, POOLS, config=COLD) as runner:
            generations(runner, prompts)
            assert hits - runner.stats()["prefix_hit_tokens"] >= head, "the third prompt found the head"


@pytest.mark.slow
def test_preemption_changes_no_bit(model: TinyModel, target: Target) -> None:
    prompts = prompts_of(2, 9, 5, 1, head=17)
    with poisoned_runner(model, target, (200, 200)) as runner:
        calm = generations(runner, prompts, 36)
        assert runner.stats()["preemptions"] == 0
    for slots in (8 * STATE_SLOTS, 30):
        with poisoned_runner(model, target, (8, slots)) as runner:
            assert generations(runner, prompts, 36) == calm
            assert runner.stats()["preemptions"] > 0
            assert runner.stats()["blocks_used"] == 0
    config = RuntimeConfig(policy=Policy.GUARANTEED_NO_EVICT)
    with poisoned_runner(model, target, (8, STATE_SLOTS), config=config) as runner:
        assert generations(runner, prompts, 36) == calm
        assert runner.stats()["preemptions"] == 0


def test_preemption_at_every_token_changes_no_bit(model: TinyModel, target: Target) -> None:
    prompt, found = prompts_of(21)[0], []
    for preempts in (False, True):
        session = open_session(model, target, 12)
        strides = [snapshot_stride(model.plan.caches, group) for group in model.plan.caches]
        loop, scheduler, _ = make_loop(session, model.plan.limits, SIZE, windows=(0, STATE_WINDOW), strides=strides)
        request = Request(np.array(prompt, np.int32), max_new_tokens=40)
        loop.add([request])
        while loop.step():
            if preempts and request in scheduler.running:
                scheduler.preempt([request])
        session.close()
        assert scheduler.preemptions > 35 if preempts else scheduler.preemptions == 0
        found.append((request.generated().tolist(), request.log_probs))
    assert found[0] == found[1]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "family",
    [
        each.FAMILY
        for each in (lfm2, lfm2_moe, granitemoehybrid, falcon_h1, kimi_linear, nemotron_h, qwen3_5_moe_text, qwen3_next)
    ],
    ids=lambda family: family.name,
)
def test_other_layers_with_states(family: Family, tmp_path: Path) -> None:
    """Short convolutions, Mamba 2, decays of dims beside latents: chunks, company, hits and preemption, on two levels
    of instructions."""
    checkpoint = random_checkpoint(tmp_path, {**family.tiny, "max_position_embeddings": 256})
    levels = [name for name in RUNNABLE if name in ("cpu/avx2", "cpu/amx")]
    config = BuildConfig(target=",".join(levels), tokens_per_block=SIZE, max_seq_len=LONGEST, autotune=False)
    build(config, checkpoint, tmp_path / "e")
    prompts = prompts_of(2, 9, 5, 30, head=33)
    for target in map(find_target, levels):
        model, alone = opened(tmp_path / "e", target), list[bytes]()
        for prompt in prompts:
            with poisoned_runner(model, target, POOLS, config=COLD) as runner:
                alone += generations(runner, [prompt], 36)
        limits = dataclasses.replace(model.plan.limits, max_num_tokens=7)
        for pools in ((60, 60), (10, 30)):
            with poisoned_runner(model, target, pools, limits) as runner:
                assert [generations(runner, [prompt], 36)[0] for prompt in prompts] == alone
                assert generations(runner, prompts, 36) == alone
                assert runner.stats()["prefix_hit_tokens"] > 0
                assert (runner.stats()["preemptions"] > 0) == (pools[0] < 60)


def test_many_requests_at_once_change_no_bit(model: TinyModel, target: Target) -> None:
    if target.name == "ref":
        return  # the kernels' own arithmetic is at stake
    prompts = prompts_of(*(1 + n * 7 % 40 for n in range(64)))
    with poisoned_runner(model, target, (400, 200)) as runner:
        alone = [everything(runner, [prompt], 4)[0] for prompt in prompts]
    with poisoned_runner(
        model, target, (400, 200), dataclasses.replace(model.plan.limits, max_num_tokens=90)
    ) as runner:
        assert everything(runner, prompts, 4) == alone


def test_a_state_takes_as_much_for_a_long_context_as_for_a_short_one(engine: Path) -> None:
    whole, state = read_plan(engine).caches
    channels, heads, key, value, layers = 128, 4, 12, 20, 2
    of_layer = -(-3 * channels // 16) * 16 + heads * key * value
    assert state.block_bytes == layers * 4 * of_layer
    assert [state.blocks_of(tokens) for tokens in (1, SIZE, SIZE + 1, LONGEST)] == [1, 1, 2, 2]
    text = inspect(engine).text
    assert "2 slots a sequence" in text
    sequence = inspect(engine).document["targets"][0]["sequence_bytes"]
    assert sequence == 13 * whole.block_bytes + STATE_SLOTS * state.block_bytes
    with ModelRunner.from_dir(engine, enable_prefix_cache=False, kv_cache_memory="4MiB") as runner:
        used: list[tuple[int, ...]] = []
        runner.executor.report_to(lambda step: used.append(tuple(pool.num_used for pool in runner.blocks.pools)))
        runner.generate(prompts_of(180), max_new_tokens=19, end_id=-1)
        assert max(count for count, _ in used) >= 12
        assert max(count for _, count in used) <= STATE_SLOTS


def test_steps_are_timed_for_a_tpot_target(engine: Path) -> None:
    with ModelRunner.from_dir(engine, tpot_target=1e4, kv_cache_memory="1MiB") as runner:
        assert runner.generate(prompts_of(40), max_new_tokens=3).shape == (1, 1, 43)


@pytest.mark.daily(1)
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("w8", 0.03), ("w4g128", 0.3)])
def test_quantised_engines_stay_near_the_exact_one(
    precision: str, bound: float, checkpoint: Path, engine: Path, tmp_path: Path
) -> None:
    """Mean difference of the logits in parts of their spread. Steps and strengths are not quantised."""
    build(BuildConfig(target="cpu", precision=precision, autotune=False), checkpoint, tmp_path / "e")
    logits: list[Any] = []
    for each in (engine, tmp_path / "e"):
        with ModelRunner.from_dir(each, target="cpu") as runner:
            out = runner.generate(prompts_of(120), max_new_tokens=1, return_dict=True, output_context_logits=True)
            logits.append(out["context_logits"][0])
    assert np.abs(logits[1] - logits[0]).mean() < bound * logits[0].std()
    plan = read_plan(tmp_path / "e")
    dtypes = {weight.name: weight.dtype.value for weight in plan.weights}
    kept = {name: dtype for name, dtype in dtypes.items() if "linear_st" in name or "attention.a_log" in name}
    assert len(kept) == 2 * 4
    assert set(kept.values()) <= {"bf16", "bf16c", "f32"}
    assert all(dtype == "f32" for name, dtype in kept.items() if not name.endswith("weight"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        kimi_linear.FAMILY,
        *(pytest.param(each.FAMILY, marks=pytest.mark.slow) for each in (qwen3_5_moe_text, qwen3_next)),
    ],
    ids=lambda family: family.name,
)
def test_quantised_mixtures_stay_near_the_exact_one(family: Family, tmp_path: Path) -> None:
    """As above, of models whose tokens also choose experts."""
    checkpoint = random_checkpoint(tmp_path, {**family.tiny, "max_position_embeddings": 256})
    logits: list[Any] = []
    for precision, bound in (("f32", 0), ("bf16", 0.02), ("w8", 0.03), ("w4g32", 0.3)):
        build(BuildConfig(target="cpu", precision=precision, autotune=False), checkpoint, tmp_path / precision)
        with ModelRunner.from_dir(tmp_path / precision, target="cpu") as runner:
            out = runner.generate(prompts_of(120), max_new_tokens=1, return_dict=True, output_context_logits=True)
            logits.append(out["context_logits"][0])
        assert np.abs(logits[-1] - logits[0]).mean() <= bound * logits[0].std()
