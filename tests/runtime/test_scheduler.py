"""Random schedules against a fake model: budgets kept, every request ends once and right, nobody waits for ever."""

import random

import numpy as np
import pytest

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.runtime.request import FinishReason, Request
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.tiny_engine import make_executor


def limits(batch: int = 4, tokens: int = 16, rows: int = 8) -> Limits:
    return Limits(max_batch_size=batch, max_input_len=40, max_seq_len=48, max_num_tokens=tokens, max_logit_rows=rows)


def request_of(prompt: list[int], count: int, *, want_context_logits: bool = False) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, want_context_logits=want_context_logits)


def random_request(rng: random.Random, *, want_context_logits: bool = False) -> Request:
    prompt = [rng.randrange(97) for _ in range(rng.randint(1, 24))]
    return request_of(prompt, rng.randint(1, 24), want_context_logits=want_context_logits)


def expected(request: Request) -> list[int]:
    return continued(request.tokens[: request.num_prompt].tolist(), request.max_new_tokens)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_end_once_and_right(policy: Policy, seed: int) -> None:
    rng = random.Random(seed)
    shape = limits(batch=rng.choice([1, 3, 8]), tokens=rng.choice([1, 5, 16]), rows=rng.choice([1, 4, 8]))
    blocks = rng.choice([12, 16, 40])  # 12 blocks of 4 hold exactly one sequence of 48
    session = FakeSession(blocks, 4, shape)
    executor, scheduler, manager = make_executor(session, shape, 4, policy, random.Random(seed))
    requests: list[Request] = []
    aborted: set[int] = set()
    for _ in range(400):
        if rng.random() < 0.3 and len(requests) < 40:
            requests.append(random_request(rng, want_context_logits=rng.random() < 0.2))
            executor.add(requests[-1:])
        if requests and rng.random() < 0.03:
            victim = rng.choice(requests)
            if not victim.finished:
                aborted.add(id(victim))
                executor.abort([victim])
                assert victim.blocks.count == 0
        executor.step()
        assert len(scheduler.running) <= shape.max_batch_size
        ages = [request.arrival for request in (*scheduler.running, *scheduler.waiting)]
        assert ages == sorted(ages)
    steps = 0
    while executor.step():
        steps += 1
        assert steps < 5000, "somebody waits for ever"
    for request in requests:
        if id(request) in aborted:
            assert request.finish_reason is FinishReason.ABORT
            continue
        assert request.finish_reason is FinishReason.LENGTH
        assert request.generated().tolist() == expected(request)
        assert len(request.log_probs) == request.max_new_tokens
        if request.want_context_logits:
            assert sum(len(piece) for piece in request.context_logits) == request.num_prompt
    assert manager.num_used == 0
    assert executor.stats()["blocks_used"] == 0
    if policy is Policy.GUARANTEED_NO_EVICT:
        assert scheduler.preemptions == 0


def test_preemption_happens_and_changes_nothing() -> None:
    shape = limits(batch=8, tokens=64)
    executor, scheduler, manager = make_executor(FakeSession(14, 4, shape), shape, 4)
    requests = [request_of([n, n + 1], 40) for n in range(6)]
    executor.add(requests)
    executor.drain()
    assert scheduler.preemptions > 0
    assert [request.generated().tolist() for request in requests] == [expected(request) for request in requests]
    assert [r.arrival for r in sorted(requests, key=lambda r: r.arrival)] == list(range(6))
    assert manager.num_used == 0


def test_one_step_carries_prefill_and_decode() -> None:
    shape = limits(batch=4, tokens=16)
    executor, _, _ = make_executor(FakeSession(40, 4, shape), shape, 4)
    executor.add([request_of([1, 2, 3], 10)])
    executor.step()
    executor.add([request_of(list(range(30)), 3)])
    executor.drain()
    log = executor.step_log()
    assert log[0] == [3, 0]
    assert log[1] == [15, 1]  # the decode row first, then as much of the prompt as fits
    assert log[2] == [15, 1]
    assert log[3] == [0, 2]


def test_chunks_never_exceed_the_logit_rows() -> None:
    shape = limits(batch=4, tokens=16, rows=2)
    executor, _, _ = make_executor(FakeSession(40, 4, shape), shape, 4)
    request = request_of(list(range(9)), 2, want_context_logits=True)
    executor.add([request])
    executor.drain()
    assert [piece.shape[0] for piece in request.context_logits] == [2, 2, 2, 2, 1]
    assert request.generated().tolist() == expected(request)


def test_no_evict_admits_whole_lengths() -> None:
    shape = limits(batch=8, tokens=64)
    executor, scheduler, _ = make_executor(FakeSession(24, 4, shape), shape, 4, Policy.GUARANTEED_NO_EVICT)
    executor.add([request_of([1], 40) for _ in range(4)])  # 40 tokens in the cache: 10 blocks each
    executor.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 2)
    executor.drain()
    assert scheduler.preemptions == 0


def test_storm_of_adds_and_aborts_leaves_nothing() -> None:
    shape = limits(batch=8, tokens=32)
    executor, _, _ = make_executor(FakeSession(40, 4, shape), shape, 4)
    before = executor.stats()
    rng = random.Random(3)
    alive: list[Request] = []
    for _ in range(2000):
        request = random_request(rng)
        executor.add([request])
        alive.append(request)
        if rng.random() < 0.2:
            executor.step()
        if len(alive) > 8 or rng.random() < 0.5:
            executor.abort([alive.pop(rng.randrange(len(alive)))])
    executor.abort(alive)
    after = executor.stats()
    assert {**after, "preemptions": 0} == {**before, "preemptions": 0}
