"""Who finds what in the prefix cache: equal heads, siblings, conversations, salts."""

import random
from typing import Any

import numpy as np
import pytest

from ingot.plan import Limits
from ingot.runtime.executor import Executor
from ingot.runtime.request import Request
from ingot.step_io import StepBatch
from tests.runtime.fake_session import VOCAB, FakeSession, continued
from tests.runtime.tiny_engine import make_executor

SIZE = 16
LIMITS = Limits(max_batch_size=8, max_input_len=400, max_seq_len=500, max_num_tokens=64, max_logit_rows=64)


def make(blocks: int = 200, *, prefix_cache: bool = True, limits: Limits = LIMITS) -> tuple[Executor, FakeSession]:
    session = FakeSession(blocks, SIZE, limits)
    return make_executor(session, limits, SIZE, prefix_cache=prefix_cache)[0], session


def request_of(tokens: list[int], count: int = 4, **more: Any) -> Request:
    return Request(np.array(tokens, np.int32), max_new_tokens=count, **more)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def prefill_tokens(executor: Executor) -> int:
    return sum(prefill for prefill, _ in executor.step_log())


def check(request: Request) -> None:
    prompt = request.tokens[: request.num_prompt].tolist()
    assert request.generated().tolist() == continued(prompt, request.max_new_tokens)


def test_a_common_head_of_48_tokens_is_found() -> None:
    executor, _ = make()
    rng = random.Random(0)
    head = random_tokens(rng, 48)
    for expected in (0, 48):
        request = request_of(head + random_tokens(rng, 7))
        executor.add([request])
        executor.drain()
        check(request)
        assert request.num_cached == expected
        assert executor.stats()["prefix_hit_tokens"] == expected
    assert prefill_tokens(executor) == 55 + 7
    assert executor.stats()["blocks_cached"] == 3  # 58 tokens were computed each time


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (48, 32), (49, 48)])
def test_a_full_hit_computes_at_least_one_token(length: int, cached: int) -> None:
    executor, _ = make()
    requests = [request_of(list(range(length))) for _ in range(2)]
    for request in requests:
        executor.add([request])
        executor.drain()
        check(request)
    assert requests[1].num_cached == cached < length


def test_generated_tokens_are_found_too_and_conversations_hit_more_each_round() -> None:
    executor, _ = make(400)
    rng = random.Random(1)
    histories = [random_tokens(rng, rng.randint(40, 60)) for _ in range(8)]
    ratios = []
    for _ in range(6):
        before = executor.stats()["prefix_hit_tokens"]
        requests = [request_of(history, 12) for history in histories]
        executor.add(requests)
        executor.drain()
        hits = executor.stats()["prefix_hit_tokens"] - before
        ratios.append(hits / sum(request.num_prompt for request in requests))
        for request in requests:
            check(request)
        histories = [r.tokens.tolist() + random_tokens(rng, rng.randint(30, 50)) for r in requests]
    assert ratios == sorted(ratios)
    assert len(set(ratios)) == 6
    assert ratios[0] == 0
    assert ratios[-1] > 0.8


def test_siblings_compute_their_prompt_once_and_share_its_full_blocks() -> None:
    executor, session = make()
    requests = [request_of(list(range(90)), 9, seed=seed) for seed in range(6)]
    tables: list[list[list[int]]] = []
    session.before_step = lambda batch: tables.append(batch.block_tables.tolist())
    executor.add(requests)
    executor.step()
    assert executor.stats()["requests_running"] == 1  # the others wait for what it computes
    executor.drain()
    for request in requests:
        check(request)
    assert [request.num_cached for request in requests] == [0, 80, 80, 80, 80, 80]
    assert prefill_tokens(executor) == 90 + 5 * 10
    together = next(table for table in tables if len(table) == 6)
    assert all(row[:5] == together[0][:5] for row in together)
    assert len({row[5] for row in together}) == 6


def test_others_do_not_wait_for_siblings() -> None:
    executor, _ = make()
    siblings = [request_of(list(range(90)), 3) for _ in range(2)]
    other = request_of([5] * 10, 3)
    executor.add([*siblings, other])
    executor.step()
    executor.step()
    assert other.num_generated > 0
    assert siblings[1].num_generated == 0


def test_siblings_go_on_when_the_first_is_aborted_or_fails() -> None:
    for fails in (False, True):
        executor, session = make()
        siblings = [request_of(list(range(130)), 3) for _ in range(3)]
        executor.add(siblings)
        executor.step()
        if fails:
            fault = iter([True])

            def fall_over(batch: StepBatch, fault: Any = fault) -> None:
                if next(fault, False):
                    raise ValueError("fell over")

            session.before_step = fall_over
            executor.step()
            assert siblings[0].error is not None
            assert executor.stats()["blocks_cached"] == 0  # what a failed request left is not trusted
        else:
            executor.abort(siblings[:1])
            assert executor.stats()["blocks_used"] == 0
        executor.drain()
        assert siblings[1].num_cached == (0 if fails else 64)
        assert siblings[2].num_cached == 128
        for request in siblings[1:]:
            check(request)


def test_a_fork_shares_full_blocks_with_the_running_request() -> None:
    executor, _ = make()
    parent = request_of(list(range(40)), 60)
    executor.add([parent])
    while parent.num_generated < 20:
        executor.step()
    fork = request_of(parent.tokens[: parent.num_tokens].tolist(), 40)
    executor.add([fork])
    executor.step()
    assert fork.num_cached == 48
    assert fork.blocks.ids[:3].tolist() == parent.blocks.ids[:3].tolist()
    assert not set(fork.blocks.ids[3:].tolist()) & set(parent.blocks.ids.tolist())
    executor.drain()
    check(parent)
    check(fork)
    assert fork.tokens.tolist() == parent.tokens.tolist()


def test_salts_part_what_tokens_would_join() -> None:
    executor, _ = make()
    requests = [request_of(list(range(40)), cache_salt=salt) for salt in (b"", b"a", b"b", b"a")]
    for request in requests:
        executor.add([request])
        executor.drain()
    assert [request.num_cached for request in requests] == [0, 0, 0, 32]


def test_it_can_be_turned_off() -> None:
    executor, _ = make(prefix_cache=False)
    requests = [request_of(list(range(40))) for _ in range(3)]
    executor.add(requests)
    executor.step()
    assert executor.stats()["requests_running"] == 2
    executor.drain()
    assert executor.stats()["blocks_cached"] == executor.stats()["prefix_hit_tokens"] == 0
    assert prefill_tokens(executor) == 3 * 40


def test_wanted_context_logits_are_computed_whatever_is_cached() -> None:
    executor, _ = make()
    first = request_of(list(range(50)))
    executor.add([first])
    executor.drain()
    second = request_of(list(range(50)), want_context_logits=True)
    executor.add([second])
    executor.drain()
    assert second.num_cached == 0
    assert sum(len(piece) for piece in second.context_logits) == 50
    rows = np.concatenate(second.context_logits)
    assert rows.argmax(axis=1)[-1] == second.generated()[0]


def test_cached_blocks_make_room_for_others() -> None:
    executor, _ = make(40)
    rng = random.Random(4)
    for _ in range(30):
        request = request_of(random_tokens(rng, 300), 20)
        executor.add([request])
        executor.drain()
        check(request)
    stats = executor.stats()
    assert stats["blocks_used"] == 0
    assert 0 < stats["blocks_cached"] <= 40
    assert stats["preemptions"] == 0


def test_a_block_that_the_last_step_filled_is_kept() -> None:
    executor, _ = make()
    request = request_of(list(range(10)), SIZE - 10 + 1)  # the last token is never computed
    executor.add([request])
    executor.drain()
    assert executor.stats()["blocks_cached"] == 1
