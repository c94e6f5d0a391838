"""Who finds what in the prefix cache: equal heads, siblings, conversations, salts."""

import random
from typing import Any

import numpy as np
import pytest

from ingot.plan import Limits
from ingot.runtime.request import Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import StepBatch
from tests.runtime.fake_session import VOCAB, FakeSession, continued
from tests.runtime.tiny_engine import make_loop

SIZE = 16
LIMITS = Limits(max_batch_size=8, max_input_len=400, max_seq_len=500, max_num_tokens=64, max_logit_rows=64)


def make(blocks: int = 200, *, prefix_cache: bool = True, limits: Limits = LIMITS) -> tuple[StepLoop, FakeSession]:
    session = FakeSession(blocks, SIZE, limits)
    return make_loop(session, limits, SIZE, prefix_cache=prefix_cache)[0], session


def request_of(tokens: list[int], count: int = 4, **more: Any) -> Request:
    return Request(np.array(tokens, np.int32), max_new_tokens=count, **more)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def prefill_tokens(loop: StepLoop) -> int:
    return sum(prefill for prefill, _ in loop.step_log())


def check(request: Request) -> None:
    prompt = request.tokens[: request.num_prompt].tolist()
    assert request.generated().tolist() == continued(prompt, request.max_new_tokens)


def test_a_common_head_of_48_tokens_is_found() -> None:
    loop, _ = make()
    rng = random.Random(0)
    head = random_tokens(rng, 48)
    for expected in (0, 48):
        request = request_of(head + random_tokens(rng, 7))
        loop.add([request])
        loop.drain()
        check(request)
        assert request.num_cached == expected
        assert loop.stats()["prefix_hit_tokens"] == expected
    assert prefill_tokens(loop) == 55 + 7
    assert loop.stats()["blocks_cached"] == 3  # 58 tokens were computed each time


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (48, 32), (49, 48)])
def test_a_full_hit_computes_at_least_one_token(length: int, cached: int) -> None:
    loop, _ = make()
    requests = [request_of(list(range(length))) for _ in range(2)]
    for request in requests:
        loop.add([request])
        loop.drain()
        check(request)
    assert requests[1].num_cached == cached < length


def test_generated_tokens_are_found_too_and_conversations_hit_more_each_round() -> None:
    loop, _ = make(400)
    rng = random.Random(1)
    histories = [random_tokens(rng, rng.randint(40, 60)) for _ in range(8)]
    ratios = []
    for _ in range(6):
        before = loop.stats()["prefix_hit_tokens"]
        requests = [request_of(history, 12) for history in histories]
        loop.add(requests)
        loop.drain()
        hits = loop.stats()["prefix_hit_tokens"] - before
        ratios.append(hits / sum(request.num_prompt for request in requests))
        for request in requests:
            check(request)
        histories = [r.tokens.tolist() + random_tokens(rng, rng.randint(30, 50)) for r in requests]
    assert ratios == sorted(ratios)
    assert len(set(ratios)) == 6
    assert ratios[0] == 0
    assert ratios[-1] > 0.8


def test_siblings_compute_their_prompt_once_and_share_its_full_blocks() -> None:
    loop, session = make()
    requests = [request_of(list(range(90)), 9, seed=seed) for seed in range(6)]
    tables: list[list[list[int]]] = []
    session.before_step = lambda batch: tables.append(batch.block_tables[0].tolist())
    loop.add(requests)
    loop.step()
    assert loop.stats()["requests_running"] == 1  # the others wait for what it computes
    loop.drain()
    for request in requests:
        check(request)
    assert [request.num_cached for request in requests] == [0, 80, 80, 80, 80, 80]
    assert prefill_tokens(loop) == 90 + 5 * 10
    together = next(table for table in tables if len(table) == 6)
    assert all(row[:5] == together[0][:5] for row in together)
    assert len({row[5] for row in together}) == 6


def test_others_do_not_wait_for_siblings() -> None:
    loop, _ = make()
    siblings = [request_of(list(range(90)), 3) for _ in range(2)]
    other = request_of([5] * 10, 3)
    loop.add([*siblings, other])
    loop.step()
    loop.step()
    assert other.num_generated > 0
    assert siblings[1].num_generated == 0


def test_siblings_go_on_when_the_first_is_aborted_or_fails() -> None:
    for fails in (False, True):
        loop, session = make()
        siblings = [request_of(list(range(130)), 3) for _ in range(3)]
        loop.add(siblings)
        loop.step()
        if fails:
            fault = iter([True])

            def fall_over(batch: StepBatch, fault: Any = fault) -> None:
                if next(fault, False):
                    raise ValueError("fell over")

            session.before_step = fall_over
            loop.step()
            assert siblings[0].error is not None
            assert loop.stats()["blocks_cached"] == 0  # what a failed request left is not trusted
        else:
            loop.abort(siblings[:1])
            assert loop.stats()["blocks_used"] == 0
        loop.drain()
        assert siblings[1].num_cached == (0 if fails else 64)
        assert siblings[2].num_cached == 128
        for request in siblings[1:]:
            check(request)


def test_a_fork_shares_full_blocks_with_the_running_request() -> None:
    loop, _ = make()
    parent = request_of(list(range(40)), 60)
    loop.add([parent])
    while parent.num_generated < 20:
        loop.step()
    fork = request_of(parent.tokens[: parent.num_tokens].tolist(), 40)
    loop.add([fork])
    loop.step()
    assert fork.num_cached == 48
    assert fork.blocks.ids[0, :3].tolist() == parent.blocks.ids[0, :3].tolist()
    assert not set(fork.blocks.ids[0, 3:].tolist()) & set(parent.blocks.ids[0].tolist())
    loop.drain()
    check(parent)
    check(fork)
    assert fork.tokens.tolist() == parent.tokens.tolist()


def test_salts_part_what_tokens_would_join() -> None:
    loop, _ = make()
    requests = [request_of(list(range(40)), cache_salt=salt) for salt in (b"", b"a", b"b", b"a")]
    for request in requests:
        loop.add([request])
        loop.drain()
    assert [request.num_cached for request in requests] == [0, 0, 0, 32]


def test_it_can_be_turned_off() -> None:
    loop, _ = make(prefix_cache=False)
    requests = [request_of(list(range(40))) for _ in range(3)]
    loop.add(requests)
    loop.step()
    assert loop.stats()["requests_running"] == 2
    loop.drain()
    assert loop.stats()["blocks_cached"] == loop.stats()["prefix_hit_tokens"] == 0
    assert prefill_tokens(loop) == 3 * 40


def test_wanted_context_logits_are_computed_whatever_is_cached() -> None:
    loop, _ = make()
    first = request_of(list(range(50)))
    loop.add([first])
    loop.drain()
    second = request_of(list(range(50)), want_context_logits=True)
    loop.add([second])
    loop.drain()
    assert second.num_cached == 0
    assert sum(len(piece) for piece in second.context_logits) == 50
    rows = np.concatenate(second.context_logits)
    assert rows.argmax(axis=1)[-1] == second.generated()[0]


@pytest.mark.slow
def test_cached_blocks_make_room_for_others() -> None:
    loop, _ = make(40)
    rng = random.Random(4)
    for _ in range(30):
        request = request_of(random_tokens(rng, 300), 20)
        loop.add([request])
        loop.drain()
        check(request)
    stats = loop.stats()
    assert stats["blocks_used"] == 0
    assert 0 < stats["blocks_cached"] <= 40
    assert stats["preemptions"] == 0


def test_a_block_that_the_last_step_filled_is_kept() -> None:
    loop, _ = make()
    request = request_of(list(range(10)), SIZE - 10 + 1)  # the last token is never computed
    loop.add([request])
    loop.drain()
    assert loop.stats()["blocks_cached"] == 1
