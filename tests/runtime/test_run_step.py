"""A step in which some requests have logits processors: each gets its own token, probability and rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import Request
from ingot.runtime.validation import make_requests
from ingot.step_io import Float32
from tests.runtime.tiny_engine import make_runner, ref_session
from tests.runtime.tiny_plan import VOCAB, make_model

PROMPT = np.array([3, 1, 4], np.int32)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = make_model()
    return make_runner(model, ref_session(model, 100))


def request_of(runner: ModelRunner, *processors: Callable[[Float32], Float32], **more: Any) -> Request:
    params = SamplingParams(max_tokens=2, temperature=0, logits_processors=processors, **more)
    return make_requests(PROMPT, params, runner.model_info, where="prompt 0")[0]


def only(token: int) -> Callable[[Float32], Float32]:
    """Leaves no other token."""
    return lambda logits: np.where(np.arange(VOCAB) == token, np.float32(0), np.float32(-np.inf))


def run(runner: ModelRunner, *requests: Request) -> None:
    runner.executor.complete(requests)


def test_probability_and_rank_are_the_models_own(runner: ModelRunner) -> None:
    free = request_of(runner, logprobs=-1)
    run(runner, free)
    ranked = free.token_probs[0].top_ids.tolist()
    least = ranked[-1]
    forced = request_of(runner, only(least), logprobs=0)
    run(runner, forced)
    assert forced.generated()[0] == least
    assert forced.token_probs[0].rank == VOCAB
    assert forced.token_probs[0].log_prob == pytest.approx(float(free.token_probs[0].top_log_probs[-1]))


def test_everybody_has_their_own_row_though_one_fails(runner: ModelRunner) -> None:
    def fails(logits: Float32) -> Float32:
        raise ValueError("no")

    alone = request_of(runner)
    run(runner, alone)
    bad, five, free, six = (request_of(runner, *each) for each in ([fails], [only(5)], [], [only(6)]))
    run(runner, bad, five, free, six)
    assert bad.error is not None
    assert [request.generated().tolist() for request in (five, free, six)] == [
        [5, 5],
        alone.generated().tolist(),
        [6, 6],
    ]
