"""Streams of token ids: one result per step, and nothing runs for a stream that was dropped."""

import dataclasses
import itertools
import random
import threading

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.runtime import ModelRunner
from ingot.step_io import StepBatch
from tests.runtime.fake_session import VOCAB, FakeSession, RepeatingSession, continued
from tests.runtime.tiny_engine import make_runner
from tests.runtime.tiny_plan import make_model


def make(kind: type[FakeSession]) -> tuple[ModelRunner, FakeSession]:
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    session = kind(400, model.plan.tokens_per_block, model.plan.limits)
    return make_runner(model, session), session


@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_told_once_though_several_come_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    runner, session = make(RepeatingSession)
    assert isinstance(session, RepeatingSession)
    prompts = [[1, n, *range(rng.randint(0, 30))] for n in range(12)]
    ends = rng.sample(range(VOCAB), 3)
    expected = [continued(prompt, 30) for prompt in prompts]
    expected = [tokens[: next((n + 1 for n, t in enumerate(tokens) if t in ends), 30)] for tokens in expected]
    before, told = np.array([len(prompt) for prompt in prompts]), 0
    with runner:
        for step in runner.generate(prompts, max_new_tokens=30, end_id=ends, streaming=True, return_dict=True):
            grown = step["sequence_lengths"][:, 0] - before
            assert set(grown.tolist()) <= {0, 1}
            assert grown.any()
            before, told = step["sequence_lengths"][:, 0], told + 1
        assert told <= len(runner.step_log())
    assert max(session.repeated) > 1
    for row, prompt, tokens in zip(step["output_ids"][:, 0], prompts, expected, strict=True):
        assert row[: len(prompt) + len(tokens)].tolist() == prompt + tokens
    assert before.tolist() == [len(prompt) + len(tokens) for prompt, tokens in zip(prompts, expected, strict=True)]


def test_what_came_in_the_step_of_a_failure_is_given_before_it_is_raised() -> None:
    poison = 66

    def fall_over(batch: StepBatch) -> None:
        if poison in batch.ids:
            raise ValueError("the kernel fell over")

    runner, session = make(FakeSession)
    session.before_step = fall_over
    stream = runner.generate([[1, 2], [3, poison]], max_new_tokens=30, streaming=True)
    assert next(stream)[:, 0].tolist() == [[1, 2, *continued([1, 2], 1)], [3, poison, 0]]
    with pytest.raises(RequestError, match="fell over"):
        next(stream)
    assert runner.stats()["requests_running"] == 0


def test_abandoned_stream_frees_its_blocks() -> None:
    gate, begun = threading.Event(), itertools.count(1)

    def hold(batch: StepBatch) -> None:
        assert next(begun) < 5 or gate.wait(30)

    runner, session = make(FakeSession)
    session.before_step = hold
    stream = runner.generate([[1, 2]], max_new_tokens=30, streaming=True)
    next(stream)
    assert runner.executor.beat.stats["blocks_used"] > 0
    del stream
    gate.set()
    assert runner.stats()["blocks_used"] == 0
    assert runner.stats()["requests_running"] == 0
    never_started = runner.generate([[1, 2]], max_new_tokens=30, streaming=True)
    del never_started
    assert runner.stats()["requests_waiting"] == 0
