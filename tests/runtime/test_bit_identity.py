"""The same request gives the same bits alone, in company, in chunks and after preemption, on every target here."""

import dataclasses
import threading

import numpy as np
import pytest

from ingot.configs.runtime import Policy, RuntimeConfig
from ingot.dtypes import DType
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.runtime import ModelRunner
from tests.runtime.tiny_engine import poisoned_runner
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model

MADE = [  # the other two of test_windows.py are tried every day
    pytest.param(("ref", DType.F32), id="ref-f32"),
    pytest.param(("cpu", DType.I8), id="cpu-i8", marks=pytest.mark.native),
    pytest.param(("ref", DType.I8), id="ref-i8", marks=pytest.mark.slow),
    pytest.param(("cpu", DType.F32), id="cpu-f32", marks=[pytest.mark.native, pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest) -> tuple[str, DType]:
    """Each target, with each kind of KV cache: of numbers, and of codes whose scales a lost bit would show."""
    name, dtype = request.param
    return name, dtype


@pytest.fixture(scope="module")
def target(made: tuple[str, DType]) -> Target:
    return find_target(made[0])


@pytest.fixture(scope="module")
def model(made: tuple[str, DType], target: Target) -> TinyModel:
    return make_model(None if target.name == "ref" else target, kv=made[1])


def everything(runner: ModelRunner, prompts: list[list[int]], count: int = 12) -> list[tuple[bytes, bytes]]:
    """Bits of all logits of each prompt, sampled so that every draw counts."""
    out = runner.generate(
        prompts,
        max_new_tokens=count,
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        random_seed=11,
        return_dict=True,
        output_generation_logits=True,
        output_context_logits=True,
    )
    return [(out["context_logits"][i].tobytes(), out["generation_logits"][i].tobytes()) for i in range(len(prompts))]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_and_company_change_no_bit(model: TinyModel, target: Target, chunk: int) -> None:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 40, 17, 5)]
    alone = []
    for prompt in prompts:
        with poisoned_runner(model, target, 40) as runner:
            alone += everything(runner, [prompt])
    limits = dataclasses.replace(model.plan.limits, max_num_tokens=chunk)
    with poisoned_runner(model, target, 100, limits, seed=chunk) as runner:
        assert everything(runner, prompts) == alone


@pytest.mark.daily(1)
def test_preemption_changes_no_bit(model: TinyModel, target: Target) -> None:
    prompts = [[n] * 9 for n in range(6)]
    with poisoned_runner(model, target, 200) as runner:
        calm = everything(runner, prompts, 40)
        assert runner.stats()["preemptions"] == 0
    with poisoned_runner(model, target, 8) as runner:
        assert everything(runner, prompts, 40) == calm
        assert runner.stats()["preemptions"] > 0
    with poisoned_runner(model, target, 8, config=RuntimeConfig(policy=Policy.GUARANTEED_NO_EVICT)) as runner:
        assert everything(runner, prompts, 40) == calm
        assert runner.stats()["preemptions"] == 0


@pytest.mark.slow
def test_staggered_arrivals_share_steps_and_change_no_bit(model: TinyModel, target: Target) -> None:
    """64 requests, each from its own thread, arrive while others decode; blocks that nobody owns are poisoned."""
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, VOCAB, 1 + n % 13).tolist() for n in range(64)]
    with poisoned_runner(model, target, 40) as runner:
        alone = [everything(runner, [prompt])[0] for prompt in prompts]
    runner = poisoned_runner(model, target, 300, dataclasses.replace(model.plan.limits, max_num_tokens=16))
    results: dict[int, tuple[bytes, bytes]] = {}

    def work(n: int) -> None:
        results[n] = everything(runner, [prompts[n]])[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[n] for n in range(64)] == alone
    assert any(prefill and decode for prefill, decode in runner.step_log())
    runner.close()


def generations(runner: ModelRunner, prompts: list[list[int]], count: int = 14) -> list[bytes]:
    """Bits of the logits of each prompt's generated tokens. Asks for nothing that a prefix hit would not give."""
    out = runner.generate(
        prompts,
        max_new_tokens=count,
        temperature=0.9,
        random_seed=3,
        return_dict=True,
        output_generation_logits=True,
        num_return_sequences=2,
    )
    return [logits.tobytes() for logits in out["generation_logits"]]


@pytest.mark.daily(1)
@pytest.mark.parametrize("chunk", [5, 16, 96])
def test_a_prefix_hit_changes_no_bit(model: TinyModel, target: Target, chunk: int) -> None:
    rng = np.random.default_rng(8)
    head = rng.integers(0, VOCAB, 35).tolist()
    prompts = [head + rng.integers(0, VOCAB, n).tolist() for n in (1, 3, 13)]
    calm = []
    for prompt in prompts:
        with poisoned_runner(model, target, 40, config=RuntimeConfig(enable_prefix_cache=False)) as runner:
            calm += generations(runner, [prompt])
            assert runner.stats()["prefix_hit_tokens"] == 0
    limits = dataclasses.replace(model.plan.limits, max_num_tokens=chunk)
    with poisoned_runner(model, target, 60, limits, seed=chunk) as runner:
        assert generations(runner, prompts) == calm  # together: siblings and equal heads
        assert runner.stats()["prefix_hit_tokens"] == 5 * 32
        assert generations(runner, prompts[::-1]) == calm[::-1]  # from what the ones before left, generated tokens too
        assert runner.stats()["prefix_hit_tokens"] >= 11 * 32


@pytest.mark.daily(1)
def test_preemption_with_hits_changes_no_bit(model: TinyModel, target: Target) -> None:
    """The pool is so small that blocks are evicted while requests that lost them wait."""
    rng = np.random.default_rng(9)
    head = rng.integers(0, VOCAB, 17).tolist()
    prompts = [head + rng.integers(0, VOCAB, n).tolist() for n in (2, 9, 5, 1)]
    with poisoned_runner(model, target, 200) as runner:
        calm = generations(runner, prompts, 36)
        assert runner.stats()["preemptions"] == 0
    with poisoned_runner(model, target, 8) as runner:
        assert generations(runner, prompts, 36) == calm
        stats = runner.stats()
        assert stats["preemptions"] > 0
        assert stats["preempted_tokens"] > 0
        assert stats["prefix_hit_tokens"] > 0
        assert stats["blocks_used"] == 0


def test_steps_without_a_single_logit_row_run(model: TinyModel, target: Target) -> None:
    """The first chunks of a prompt that is alone give no logits at all."""
    limits = dataclasses.replace(model.plan.limits, max_num_tokens=16)
    prompt = [n % VOCAB for n in range(45)]
    with poisoned_runner(model, target, 40, limits) as runner:
        assert runner.generate([prompt], max_new_tokens=2)[0, 0].tolist() == model.greedy(prompt, 2)
        assert runner.step_log()[:3] == [[16, 0], [16, 0], [13, 0]]
