"""Layers with windows: blocks behind them go back, and neither tokens nor bits tell."""

import dataclasses
import itertools
import random
from unittest import mock

import numpy as np
import pytest

from ingot.configs.runtime import Policy, RuntimeConfig
from ingot.dtypes import DType
from ingot.plan import window_blocks
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.runtime import ModelRunner
from ingot.runtime.request import FinishReason, Request
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, SubmittingSession, continued
from tests.runtime.test_bit_identity import everything, generations
from tests.runtime.tiny_engine import PoisonedSession, make_loop, poisoned_runner
from tests.runtime.tiny_plan import TOKENS_PER_BLOCK, VOCAB, TinyModel, make_model
from tests.spanning import pairs, spanning

WINDOWS = (0, 21)  # of the two layers: the second one looks back further than a block, and not two
LONG = 40


MADE = [  # the other two of test_bit_identity.py are tried every day
    pytest.param(("ref", DType.I8), id="ref-i8"),
    pytest.param(("cpu", DType.F32), id="cpu-f32", marks=pytest.mark.native),
    pytest.param(("ref", DType.F32), id="ref-f32", marks=pytest.mark.slow),
    pytest.param(("cpu", DType.I8), id="cpu-i8", marks=[pytest.mark.native, pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest) -> tuple[str, DType]:
    name, dtype = request.param
    return name, dtype


@pytest.fixture(scope="module")
def target(made: tuple[str, DType]) -> Target:
    return find_target(made[0])


@pytest.fixture(scope="module")
def models(made: tuple[str, DType], target: Target) -> tuple[TinyModel, TinyModel]:
    """The same with a group of its own for the window, and with one group that keeps everything."""
    kernels = None if target.name == "ref" else target
    freeing, keeping = (
        make_model(kernels, kv=made[1], windows=WINDOWS, frees_windows=frees) for frees in (True, False)
    )
    assert (len(freeing.plan.caches), len(keeping.plan.caches)) == (2, 1)
    return freeing, keeping


Models = tuple[TinyModel, TinyModel]


@pytest.mark.daily(1)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_and_company_change_no_bit(models: Models, target: Target, chunk: int) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 45, 37, 5)]
    freeing, keeping = models
    alone = []
    for prompt in prompts:
        with poisoned_runner(keeping, target, LONG) as runner:
            alone += everything(runner, [prompt])
    limits = dataclasses.replace(freeing.plan.limits, max_num_tokens=chunk)
    with poisoned_runner(freeing, target, (LONG, 12), limits, seed=chunk) as runner:
        assert everything(runner, prompts) == alone


def test_tokens_are_those_of_the_formulae(models: Models, target: Target) -> None:
    if models[0].plan.caches[0].dtype is not DType.F32:
        return
    prompt = [n * 7 % VOCAB for n in range(44)]
    with poisoned_runner(models[0], target, 8) as runner:
        assert runner.generate([prompt], max_new_tokens=16)[0, 0].tolist() == models[0].greedy(prompt, 16)


@pytest.mark.daily(7)
@pytest.mark.parametrize("head", [0, 16, 21, 32, 47, 48])
def test_a_prefix_hit_changes_no_bit(models: Models, target: Target, head: int) -> None:
    rng = np.random.default_rng(8)
    whole = rng.integers(0, VOCAB, 48).tolist()
    prompts = [whole[:48], whole[:head] + rng.integers(0, VOCAB, 48 - head).tolist()]
    calm = []
    for prompt in prompts:
        with poisoned_runner(models[1], target, LONG, config=RuntimeConfig(enable_prefix_cache=False)) as runner:
            calm += generations(runner, [prompt])
    with poisoned_runner(models[0], target, LONG, seed=head) as runner:
        assert generations(runner, prompts[:1]) + generations(runner, prompts[1:]) == calm
        least = min(head, 47) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
        assert runner.stats()["prefix_hit_tokens"] >= 32 + 32 + least, "of siblings, and of the head"


@pytest.mark.daily(1)
def test_preemption_changes_no_bit(models: Models, target: Target) -> None:
    rng = np.random.default_rng(9)
    head = rng.integers(0, VOCAB, 17).tolist()
    prompts = [head + rng.integers(0, VOCAB, n).tolist() for n in (2, 9, 5, 1)]
    with poisoned_runner(models[1], target, 200) as runner:
        calm = generations(runner, prompts, 36)
        assert runner.stats()["preemptions"] == 0
    with poisoned_runner(models[0], target, (8, 33)) as runner:
        assert generations(runner, prompts, 36) == calm
        stats = runner.stats()
        assert stats["preemptions"] > 0
        assert stats["blocks_used"] == 0
        groups = stats["blocks_by_group"]
        assert [group["total"] for group in groups] == [8, 33]
        assert [group["window"] for group in groups] == [group.window for group in models[0].plan.caches]
        for count in ("total", "used", "cached"):
            assert sum(group[count] for group in groups) == stats[f"blocks_{count}"]  # type: ignore[literal-required]
    config = RuntimeConfig(policy=Policy.GUARANTEED_NO_EVICT)
    with poisoned_runner(models[0], target, (8, 5), config=config) as runner:
        assert generations(runner, prompts, 36) == calm
        assert runner.stats()["preemptions"] == 0


def held(runner: ModelRunner, prompt: list[int], new: int) -> list[int]:
    """The most blocks that a request holds in each group, read by the thread that runs the steps."""
    pools, run = runner.blocks.pools, PoisonedSession.run
    most = [0] * len(pools)

    def counted(session: PoisonedSession, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        most[:] = [max(count, pool.num_used) for count, pool in zip(most, pools, strict=True)]
        return run(session, batch, ahead)

    with mock.patch.object(PoisonedSession, "run", counted):
        runner.generate([prompt], max_new_tokens=new)
    return most


def test_a_long_context_takes_no_more_of_a_window_than_a_short_one() -> None:
    freeing, keeping = (make_model(windows=WINDOWS, frees_windows=frees) for frees in (True, False))
    target = find_target("ref")
    limits = dataclasses.replace(freeing.plan.limits, max_num_tokens=TOKENS_PER_BLOCK)
    with poisoned_runner(freeing, target, LONG, limits) as runner:
        assert held(runner, [3] * 33, 20) == [4, 3]
    with poisoned_runner(keeping, target, LONG, limits) as runner:
        assert held(runner, [3] * 33, 20) == [4]
    assert window_blocks(WINDOWS[1], TOKENS_PER_BLOCK) == 4, "what it may hold while a chunk is computed"


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("windows", "policy", "prefix_cache", "kind"),
    spanning(
        itertools.product([(0, 9), (0, 3, 17), (0, 1)], Policy, [True, False], [FakeSession, SubmittingSession]),
        *pairs(4),
    ),
)
def test_random_requests_end_with_their_tokens(
    windows: tuple[int, ...], policy: Policy, prefix_cache: bool, kind: type[FakeSession]
) -> None:
    size, rng = 4, random.Random(len(windows) + prefix_cache)
    pools = [12] + [window_blocks(window, size) + rng.randrange(12) for window in windows[1:]]
    limits = dataclasses.replace(
        make_model().plan.limits, max_batch_size=5, max_num_tokens=rng.choice([1, 5, 40]), max_logit_rows=5
    )
    session = kind(pools, size, limits, windows)
    loop, scheduler, blocks = make_loop(
        session, limits, size, policy, shuffle=rng, prefix_cache=prefix_cache, mixed=rng.random() < 0.8, windows=windows
    )
    live: list[tuple[list[int], int, Request]] = []
    for _ in range(30):
        prompt, new = [rng.randrange(2) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 18)
        request = Request(np.array(prompt, np.int32), max_new_tokens=new)
        loop.require_fits([request])
        loop.add([request])
        live.append((prompt, new, request))
        for _ in range(rng.randrange(4)):
            loop.step()
        if rng.random() < 0.1:
            loop.abort([rng.choice(live)[2]])
    loop.drain()
    for prompt, new, request in live:
        if request.finish_reason is not FinishReason.ABORT:
            assert request.tokens[len(prompt) : request.num_tokens].tolist() == continued(prompt, new)
    assert blocks.num_used == 0
    assert all(pool.claimed == 0 for pool in blocks.pools)
    assert scheduler.preemptions == 0 or policy is Policy.MAX_UTILIZATION
