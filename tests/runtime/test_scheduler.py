"""Random schedules against a fake model: budgets kept, every request ends once and right, nobody waits for ever."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from ingot.configs.runtime import Policy
from ingot.plan import Limits
from ingot.runtime import ModelRunner, session
from ingot.runtime.block_manager import Hits
from ingot.runtime.block_table import BlockTable
from ingot.runtime.request import PRIORITY_STEP, FinishReason, Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
from tests.runtime.fake_session import FakeSession, RepeatingSession, continued
from tests.runtime.tiny_engine import make_loop, write_tiny
from tests.runtime.tiny_plan import make_model
from tests.spanning import pairs, spanning

SESSIONS = (FakeSession, RepeatingSession)


def limits(batch: int = 4, tokens: int = 16, rows: int = 8) -> Limits:
    return Limits(max_batch_size=batch, max_input_len=40, max_seq_len=48, max_num_tokens=tokens, max_logit_rows=rows)


def request_of(prompt: list[int], count: int, *, want_context_logits: bool = False, priority: int = 0) -> Request:
    return Request(
        np.array(prompt, np.int32), max_new_tokens=count, want_context_logits=want_context_logits, priority=priority
    )


def random_request(rng: random.Random, *, want_context_logits: bool = False) -> Request:
    """Prompts begin with one of few heads, so that many share blocks."""
    head = [rng.randrange(3)] * rng.randint(0, 12)
    prompt = head + [rng.randrange(97) for _ in range(rng.randint(1, 24 - len(head)))]
    priority = rng.choice([-1, 0, 0, 0, 1])
    return request_of(prompt, rng.randint(1, 24), want_context_logits=want_context_logits, priority=priority)


def expected(request: Request) -> list[int]:
    return continued(request.tokens[: request.num_prompt].tolist(), request.max_new_tokens)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("policy", "seed", "mixed", "prefix_cache", "kind"),
    spanning(
        itertools.product(Policy, range(2), [True, False], [True, False], [FakeSession, RepeatingSession]), *pairs(5)
    ),
)
def test_random_arrivals_end_once_and_right(
    policy: Policy, seed: int, mixed: bool, prefix_cache: bool, kind: type[FakeSession]
) -> None:
    rng = random.Random(seed)
    shape = limits(batch=rng.choice([1, 3, 8]), tokens=rng.choice([1, 5, 16]), rows=rng.choice([1, 4, 8]))
    blocks = rng.choice([12, 16, 40])  # 12 blocks of 4 hold exactly one sequence of 48
    session = kind(blocks, 4, shape)
    loop, scheduler, manager = make_loop(
        session, shape, 4, policy, random.Random(seed), prefix_cache=prefix_cache, mixed=mixed
    )
    requests = _arrive(loop, scheduler, rng, shape)
    steps = 0
    while loop.step():
        steps += 1
        assert steps < 5000, "somebody waits for ever"
    for request in requests:
        if request.finish_reason is FinishReason.ABORT:
            continue
        assert request.finish_reason is FinishReason.LENGTH
        assert request.generated().tolist() == expected(request)
        assert len(request.log_probs) == request.max_new_tokens
        if request.want_context_logits:
            assert sum(len(piece) for piece in request.context_logits) == request.num_prompt
    assert manager.num_used == 0
    if policy is Policy.GUARANTEED_NO_EVICT:
        assert scheduler.preemptions == 0
    if not mixed:
        assert all(not prefill or not decode for prefill, decode in loop.step_log())
    if not prefix_cache:
        assert loop.stats()["prefix_hit_tokens"] == loop.stats()["blocks_cached"] == 0


def _arrive(loop: StepLoop, scheduler: Scheduler, rng: random.Random, shape: Limits) -> list[Request]:
    """Requests come and are aborted at any moment while steps run; those aborted, and no others, end early."""
    requests: list[Request] = []
    aborted: set[Request] = set()
    for _ in range(200):
        if rng.random() < 0.3 and len(requests) < 40:
            requests.append(random_request(rng, want_context_logits=rng.random() < 0.2))
            loop.add(requests[-1:])
        if requests and rng.random() < 0.03:
            victim = rng.choice(requests)
            if not victim.finished:
                aborted.add(victim)
                loop.abort([victim])
                assert victim.blocks.count == 0
        loop.step()
        assert len(scheduler.running) <= shape.max_batch_size
        for queue in (scheduler.running, scheduler.waiting):
            orders = [request.order for request in queue]
            assert orders == sorted(orders)
        assert all((request.finish_reason is FinishReason.ABORT) == (request in aborted) for request in requests)
    return requests


def test_preemption_happens_and_changes_nothing() -> None:
    shape = limits(batch=8, tokens=64)
    loop, scheduler, manager = make_loop(FakeSession(14, 4, shape), shape, 4)
    requests = [request_of([n, n + 1], 40) for n in range(6)]
    loop.add(requests)
    loop.drain()
    assert scheduler.preemptions > 0
    assert [request.generated().tolist() for request in requests] == [expected(request) for request in requests]
    assert [r.arrival for r in sorted(requests, key=lambda r: r.arrival)] == list(range(6))
    assert manager.num_used == 0


def test_one_step_carries_prefill_and_decode() -> None:
    shape = limits(batch=4, tokens=16)
    loop, _, _ = make_loop(FakeSession(40, 4, shape), shape, 4)
    loop.add([request_of([1, 2, 3], 10)])
    loop.step()
    loop.add([request_of(list(range(30)), 3)])
    loop.drain()
    log = loop.step_log()
    assert log[0] == [3, 0]
    assert log[1] == [12, 1]  # the decode row first, then as much of the prompt as fits, in tiles of 4
    assert log[2] == [12, 1]
    assert log[3] == [6, 1]
    assert log[4] == [0, 2]


def test_chunks_end_on_tiles_or_with_the_prompt() -> None:
    shape = limits(batch=6, tokens=23)
    loop, scheduler, _ = make_loop(FakeSession(90, 8, shape), shape, 8)
    rng = random.Random(2)
    loop.add([request_of([rng.randrange(97) for _ in range(rng.randint(20, 40))], 8) for _ in range(8)])
    chunked = 0
    while loop.step():
        for request in scheduler.running:
            chunked += 0 < request.num_computed < request.num_prompt
            assert request.num_computed % 8 == 0 or request.num_computed >= request.num_prompt
    assert chunked > 4


def test_without_mixing_prompts_stay_whole_and_go_first() -> None:
    shape = limits(batch=4, tokens=32)
    loop, _, _ = make_loop(FakeSession(90, 4, shape), shape, 4, mixed=False)
    loop.add([request_of([n] * 20, 3) for n in range(2)])
    loop.add([request_of([5] * 35, 3)])  # more than a step: cut, but never mixed
    loop.drain()
    assert loop.step_log() == [[20, 0], [20, 0], [32, 0], [3, 0], [0, 3], [0, 3]]


def test_a_budget_below_a_tile_still_advances() -> None:
    shape = limits(batch=4, tokens=5)
    loop, _, _ = make_loop(FakeSession(90, 16, shape), shape, 16)
    loop.add([request_of([n], 30) for n in range(3)])
    loop.step()
    late = request_of(list(range(20)), 2)
    loop.add([late])
    for _ in range(12):
        loop.step()
    assert late.num_generated == 2
    assert loop.step_log()[1] == [2, 3]


def test_chunks_never_exceed_the_logit_rows() -> None:
    shape = limits(batch=4, tokens=16, rows=2)
    loop, _, _ = make_loop(FakeSession(40, 4, shape), shape, 4)
    request = request_of(list(range(9)), 2, want_context_logits=True)
    loop.add([request])
    loop.drain()
    assert [piece.shape[0] for piece in request.context_logits] == [2, 2, 2, 2, 1]
    assert request.generated().tolist() == expected(request)


def test_no_evict_admits_whole_lengths() -> None:
    shape = limits(batch=8, tokens=64)
    loop, scheduler, _ = make_loop(FakeSession(24, 4, shape), shape, 4, Policy.GUARANTEED_NO_EVICT)
    loop.add([request_of([1], 40) for _ in range(4)])  # 40 tokens in the cache: 10 blocks each
    loop.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 2)
    loop.drain()
    assert scheduler.preemptions == 0


@pytest.mark.slow
def test_storm_of_adds_and_aborts_leaves_nothing() -> None:
    shape = limits(batch=8, tokens=32)
    loop, _, manager = make_loop(FakeSession(14, 4, shape), shape, 4)
    before = loop.stats()
    rng = random.Random(3)
    alive: list[Request] = []
    for _ in range(10_000):
        request = random_request(rng)
        loop.add([request])
        alive.append(request)
        if rng.random() < 0.1:
            loop.step()
        if len(alive) > 8 or rng.random() < 0.4:
            loop.abort([alive.pop(rng.randrange(len(alive)))])
    loop.abort(alive)
    after = loop.stats()
    assert after["preemptions"] > 0
    assert after["prefix_hit_tokens"] > 0
    for name in ("blocks_total", "blocks_used", "requests_running", "requests_waiting"):
        assert after[name] == before[name]
    assert not loop.step()
    assert manager.num_free + after["blocks_cached"] == after["blocks_total"]
    hits = manager.lookup(BlockTable(), np.arange(1000, 1041, dtype=np.int32), 40)
    assert hits is not None
    assert hits.count == 0
    whole = request_of(list(range(50, 74)), 24)
    loop.add([whole])
    loop.drain()
    assert whole.generated().tolist() == expected(whole)


def test_the_cheapest_later_request_is_preempted() -> None:
    """Blocks of 4. The first request needs a fifth block; of the two after it, the last has computed more."""
    shape = limits(batch=3, tokens=64)
    loop, scheduler, manager = make_loop(FakeSession(13, 4, shape), shape, 4)
    first, cheap, dear = request_of([1] * 14, 8), request_of([2] * 6, 20), request_of([3] * 17, 20)
    loop.add([first, cheap, dear])
    loop.step()
    assert [request.blocks.count for request in (first, cheap, dear)] == [4, 2, 5]
    others = BlockTable()
    assert manager.reserve([(others, 8)])  # the last two blocks
    loop.step()
    loop.step()  # cheap reached 8 tokens, first 16
    assert scheduler.preemptions == 0
    loop.step()
    stats = loop.stats()
    assert (stats["preempted_for_others"], stats["preempted_for_itself"]) == (1, 0)
    assert scheduler.waiting == [cheap]
    assert dear in scheduler.running
    loop.abort([dear])
    manager.release(others)
    loop.drain()
    assert loop.stats()["preempted_tokens"] == 4  # of 8; its other full block was still cached
    assert cheap.generated().tolist() == expected(cheap)


def test_of_equals_the_last_is_preempted() -> None:
    shape = limits(batch=3, tokens=64)
    loop, scheduler, _ = make_loop(FakeSession(9, 4, shape), shape, 4, prefix_cache=False)
    requests = [request_of([n] * 5, 12) for n in range(3)]  # in the end four blocks each
    loop.add(requests)
    while not scheduler.preemptions:
        loop.step()
    assert scheduler.waiting == requests[2:]
    assert scheduler.running == requests[:2]


def test_who_gives_no_block_is_preempted_last() -> None:
    """Its blocks are others', too: to send it away costs little and brings nothing."""
    shape = limits(batch=3, tokens=64)
    _, scheduler, manager = make_loop(FakeSession(9, 4, shape), shape, 4)
    owner, sharer, giver = request_of([1] * 9, 4), request_of([1] * 9, 4), request_of([2] * 5, 4)
    for request, computed in ((owner, 8), (sharer, 8), (giver, 4)):
        hits = manager.lookup(request.blocks, request.tokens, 8) or Hits(count=0, blocks=([],))
        known = request.tokens[: 5 if request is giver else 8]
        assert manager.start(request.blocks, hits, known, len(known))
        request.num_computed = computed
        manager.advance(request.blocks, request.tokens, computed)
    assert [manager.num_alone(request.blocks) for request in (owner, sharer, giver)] == [0, 0, 2]
    assert min((sharer, giver), key=scheduler._cost) is giver
    assert min((giver, sharer), key=scheduler._cost) is giver


def test_nobody_starts_whom_the_next_block_of_another_would_send_back() -> None:
    shape = limits(batch=4, tokens=64)
    loop, scheduler, _ = make_loop(FakeSession(3, 4, shape), shape, 4)
    grows, waits = request_of([1] * 6, 6), request_of([2] * 4, 1)  # two blocks and soon three; one
    loop.add([grows, waits])
    loop.step()
    assert (scheduler.running, scheduler.waiting) == ([grows], [waits])
    loop.drain()
    assert scheduler.preemptions == 0
    full = request_of([3] * 6, 2)  # its two blocks are all that it will ever need
    late = request_of([4] * 4, 1)
    loop.add([full, late])
    loop.step()
    assert late.finished


def test_lower_priority_numbers_go_first_but_nobody_is_overtaken_for_ever() -> None:
    shape = limits(batch=1, tokens=16)
    loop, _, _ = make_loop(FakeSession(40, 4, shape), shape, 4)
    running = request_of([9], 6)
    loop.add([running])
    loop.step()
    late, normal, urgent = (request_of([n], 1, priority=p) for n, p in ((1, 1), (2, 0), (3, -1)))
    loop.add([late, normal, urgent])
    order: list[Request] = []

    def run() -> None:
        loop.step()
        order.extend(r for r in (running, urgent, normal, late) if r.finished and r not in order)

    while not normal.finished:
        run()
    assert order == [running, urgent, normal]
    for n in range(PRIORITY_STEP + 9):  # one step for each: the later request would wait for ever without its turn
        loop.add([request_of([n % 97], 1)])
        run()
        if late.finished:
            break
    assert late.finished
    assert n > PRIORITY_STEP - 9


def test_prompts_beside_decode_rows_come_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, prompts = write_tiny(tmp_path / "tiny", make_model()), [[n] * 40 for n in range(5)]
    monkeypatch.setattr(session, "PREFILL_CHUNK", 16)
    steps, rows = {}, {}
    for most in (None, 64):
        with ModelRunner.from_dir(directory, max_num_tokens=most) as runner:
            rows[most] = runner.generate(prompts, max_new_tokens=6)
            steps[most] = runner.step_log()
    np.testing.assert_array_equal(rows[None], rows[64])
    assert steps[None][0] == [96, 0]  # nobody decodes yet
    assert max(prefill for prefill, decode in steps[None] if decode) == 16
    assert max(prefill for prefill, decode in steps[64] if decode) > 16  # what the user says holds


def test_a_request_starts_though_others_could_one_day_fill_every_block() -> None:
    shape = limits(batch=3, tokens=64)
    loop, scheduler, _ = make_loop(FakeSession(8, 4, shape), shape, 4)
    long, short = request_of([1] * 4, 29), request_of([2] * 4, 3)  # eight blocks in the end, and two
    loop.add([long, short])
    loop.step()
    assert scheduler.running == [long, short]
