"""Steps that pipeline stages compute at once: of other requests, or neighbouring chunks of a prompt; each token is
computed once, whatever leaves or fails."""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.errors import RankError, RequestError
from ingot.plan import STATE_SLOTS, STATE_WINDOW
from ingot.plugins.sequences import drawing_slots
from ingot.runtime.request import Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, Int32, SequenceRules, StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, next_token
from tests.runtime.repeating import LIMITS, check, check_ends, request_of, run_random_requests
from tests.runtime.tiny_engine import make_loop


class FakePipeline(FakeSession):
    """Checks that steps run in the order of their announcements, and that a sequence is in two of them only with
    neighbouring chunks, the first of which draws nothing.

    most    steps that were under way at once
    shared  how often a sequence was in more than one of them
    """

    def __init__(self, num_blocks: int | Sequence[int], stages: int, window: int = 0) -> None:
        """window: of a second cache group; STATE_WINDOW: one with states."""
        windows = (0, window) if window else (0,)
        super().__init__(num_blocks, 4, LIMITS, windows, [False, window == STATE_WINDOW][: len(windows)])
        self.stages, self.most, self.shared = stages, 0, 0
        self.under_way = deque[StepBatch]()
        self._started = Counter[int]()  # by slot
        self._in_steps = deque[dict[tuple[int, int], int | None]]()  # where each sequence goes on; None: it draws

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        self._started[slot] += 1
        super().start(slot, rules, tokens, num_prompt)

    def announce(self, batch: StepBatch) -> None:
        drawing = set(drawing_slots(batch).tolist())
        while len(self._in_steps) > len(self.under_way):
            self._in_steps.popleft()
        own = dict[tuple[int, int], int | None]()
        counts = np.diff(batch.query_starts).tolist()
        for slot, past, count in zip(batch.slots.tolist(), batch.past_lengths.tolist(), counts, strict=True):
            sequence = slot, self._started[slot]
            before = [step[sequence] for step in self._in_steps if sequence in step]
            assert before[-1:] in ([], [past]), "a chunk follows the one before, and no draw"
            self.shared += bool(before)
            own[sequence] = None if slot in drawing else past + count
        self._in_steps.append(own)
        self.under_way.append(self._sequences.complete(batch))
        self.most = max(self.most, len(self.under_way))
        assert self.most <= self.stages

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        if not self.under_way:
            return super().run(batch, ahead)
        first = self.under_way[0]
        assert ahead is None
        for name in ("query_starts", "past_lengths", "block_tables", "logit_rows"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(first, name))
        batch = dataclasses.replace(batch, ids=first.ids)
        self.before_step(batch)
        self.under_way.popleft()
        before, self.before_step = self.before_step, lambda batch: None
        try:
            return super().run(batch)
        finally:
            self.before_step = before

    def settle(self) -> None:
        before, self.before_step = self.before_step, lambda batch: None
        while self.under_way:
            self._compute(dataclasses.replace(self.under_way.popleft(), draws=np.zeros(0, np.int32)), [])
        self.before_step = before

    def close(self) -> None:
        self.settle()
        super().close()


def make(
    stages: int = 2, num_blocks: int | Sequence[int] = 400, window: int = 0, shuffle: random.Random | None = None
) -> tuple[StepLoop, FakePipeline]:
    session = FakePipeline(num_blocks, stages, window)
    windows, strides = ([0, window], [0, 2 * (window == STATE_WINDOW)]) if window else ([0], [0])
    return make_loop(session, LIMITS, 4, shuffle=shuffle, windows=windows, strides=strides)[0], session


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_has_a_step(stages: int) -> None:
    loop, session = make(stages)
    requests = [request_of([1, n], 20) for n in range(6)]
    loop.add(requests)
    loop.drain()
    for request in requests:
        check(request)
        assert request.num_generated == 20
    assert session.most == stages
    assert loop.work.overlapped > loop.work.steps // 2
    assert loop.work.idle_stages < loop.work.steps // 4
    assert max(rows for _, rows in loop.step_log()) == -(-6 // stages), "each step has its part of the requests"
    assert not loop.has_work


def test_one_request_alone_has_no_company() -> None:
    loop, session = make()
    loop.add([request := request_of([1, 2], 9)])
    loop.drain()
    check(request)
    assert (loop.work.overlapped, session.most) == (0, 1)
    assert loop.work.idle_stages == loop.work.steps == 9, "a stage waits for the other one in each step"


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_chunks_of_a_prompt_fill_the_stages(stages: int) -> None:
    """Stages idle while the last chunks pass through, not in each step."""
    loop, session = make(stages)
    loop.add([request := request_of([n % 7 for n in range(100)], 1)])
    loop.drain()
    check(request)
    chunks = loop.work.steps
    assert chunks >= 4, "32 tokens of a step at most"
    assert session.most == stages
    assert loop.work.idle_stages == stages * (stages - 1) // 2, "by one chunk alone: stages - 1"
    assert (session.shared, loop.work.overlapped) == (chunks - 1, chunks - 1)


def test_chunks_go_beside_every_decode_step() -> None:
    """A long prompt that comes while others decode is in each step, not in every other one."""
    loop, session = make(2)
    decoding = [request_of([1, n], 60) for n in range(4)]
    loop.add(decoding)
    for _ in range(9):
        loop.step()
    loop.add([long := request_of([n % 5 for n in range(120)], 2)])
    log = len(loop.step_log())
    while not long.num_generated:
        loop.step()
    steps = loop.step_log()[log:]
    assert [rows for _, rows in steps] == [2] * len(steps), "each step has its part of those that decode"
    assert sum(tokens > 0 for tokens, _ in steps) >= len(steps) - 2
    loop.drain()
    for request in (*decoding, long):
        check(request)
    assert session.shared


def test_a_short_prompt_goes_beside_the_last_chunk_of_a_long_one() -> None:
    loop, _ = make(2)
    loop.add([request_of([n % 5 for n in range(40)], 2), request_of([1, 2, 3, 4, 5], 2)])
    loop.drain()
    assert [tokens for tokens, _ in loop.step_log() if tokens] == [32, 8 + 5]


def test_who_needs_a_block_waits_for_steps_under_way() -> None:
    """They may give blocks soon: the request is not preempted, and nor are theirs."""
    _, scheduler, _ = make_loop(FakePipeline(3, 2), LIMITS, 4)
    requests = [request_of([1, 2, 3, 4], 9) for _ in range(2)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        scheduler.add(request)
    assert scheduler.schedule() == dict.fromkeys(requests, 4)
    for request in requests:
        request.num_computed = 4
        request.append(1, 0.0)
    first, second = requests
    assert scheduler.schedule(1) == {first: 1}, "with the third block"
    first.num_under_way = 1
    assert scheduler.schedule() == {}
    assert scheduler.running == requests
    first.num_under_way = 0
    assert scheduler.schedule() == {first: 1}
    assert scheduler.waiting == [second]


def test_logits_of_a_prompt_in_chunks() -> None:
    """8 rows of logits in a step at most: four chunks."""
    loop, session = make(2)
    prompt = [n % 7 for n in range(31)]
    request = Request(np.array(prompt, np.int32), max_new_tokens=3, want_context_logits=True)
    request.want_generation_logits = True
    loop.add([request])
    loop.drain()
    check(request)
    assert session.shared == 3
    context = np.concatenate(request.context_logits)
    assert context.argmax(axis=1).tolist() == [next_token(prompt[: n + 1]) for n in range(31)]
    assert [int(row.argmax()) for row in request.generation_logits] == request.generated().tolist()


def test_chunks_under_way_of_a_request_that_leaves() -> None:
    loop, session = make(3)
    loop.add([gone := request_of([n % 5 for n in range(130)], 20)])
    for _ in range(2):
        loop.step()
    assert len(session.under_way) == 2
    assert gone.num_under_way == 64
    loop.abort([gone])
    assert loop.stats()["blocks_used"] == 0
    loop.add([late := request_of([n % 5 for n in range(130)], 12)])  # in its slot and its blocks
    loop.drain()
    check(late)
    assert late.num_generated == 12
    assert loop.stats()["blocks_used"] == 0


def test_others_find_no_block_before_its_step_has_run() -> None:
    loop, _ = make(2)
    prompt = [n % 5 for n in range(100)]
    first, second = request_of(prompt, 3), request_of([*prompt, 1], 3)
    loop.add([first])
    loop.step()
    assert first.num_begun == 64
    assert first.blocks.sealed == 8, "of 32 tokens"
    loop.add([second])
    loop.drain()
    check(first)
    check(second)
    assert second.num_cached == 100
    assert loop.stats()["blocks_used"] == 0


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("states", [False, True])
def test_a_chunk_that_fails_takes_those_behind_it_along(at: int, states: bool) -> None:
    """They are computed again; only a request that fails by itself ends."""
    loop, session = make(3, [60, 12], STATE_WINDOW) if states else make(3, 60)
    request, steps = request_of([n % 5 for n in range(130)], 5), 0

    def fail(batch: StepBatch) -> None:
        nonlocal steps
        steps += 1
        if steps == at + 1:
            raise ValueError("the kernel fell over")

    session.before_step = fail
    loop.add([request])
    loop.drain()
    if states:
        check(request)
        assert request.num_generated == 5
        assert loop.stats()["preemptions"] == 1, "the state is not known any more"
    else:
        assert isinstance(request.error, RequestError)
    assert request.num_under_way == 0
    assert loop.stats()["blocks_used"] == 0


def test_a_request_that_leaves_while_its_step_is_under_way() -> None:
    loop, session = make(2)
    requests = [request_of([1, n], 20) for n in range(4)]
    loop.add(requests)
    for _ in range(5):
        loop.step()
    assert len(session.under_way) == 1
    gone = next(r for r in requests if r.slot in session.under_way[0].slots.tolist())
    loop.abort([gone])
    loop.add([late := request_of([7, 7], 12)])  # in its slot
    loop.drain()
    for request in (*(each for each in requests if each is not gone), late):
        check(request)
        assert request.num_generated == request.max_new_tokens
    check(gone)
    assert loop.stats()["blocks_used"] == 0


def test_what_is_under_way_ends_and_nothing_else_begins() -> None:
    """As before a block moves: every token that was computed counts."""
    loop, session = make(3)
    requests = [request_of([1, n], 20) for n in range(6)]
    loop.add(requests)
    for _ in range(4):
        loop.step()
    assert len(session.under_way) == 2
    before = loop.work.steps
    loop.settle()
    assert not session.under_way
    assert loop.work.steps == before + 2
    loop.settle()
    assert loop.work.steps == before + 2
    loop.drain()
    for request in requests:
        check(request)
        assert request.num_generated == 20
    assert loop.work.overlapped > loop.work.steps // 2


def test_a_fault_fails_whom_it_concerns() -> None:
    loop, session = make(2)
    requests = [request_of([1, n], 14) for n in range(4)]

    def fail(batch: StepBatch) -> None:
        if requests[1].slot in batch.slots.tolist() and requests[1].num_generated > 5:
            raise ValueError("the kernel fell over")

    session.before_step = fail
    loop.add(requests)
    loop.drain()
    assert isinstance(requests[1].error, RequestError)
    for request in requests:
        check(request)
    assert [request.num_generated for request in requests if request is not requests[1]] == [14] * 3
    assert loop.stats()["blocks_used"] == 0


def test_a_lost_rank_is_the_end() -> None:
    loop, session = make(2)
    requests = [request_of([1, n], 14) for n in range(4)]

    def lose(batch: StepBatch) -> None:
        if requests[0].num_generated > 3:
            raise RankError("rank 1 has ended")

    session.before_step = lose
    loop.add(requests)
    with pytest.raises(RankError):
        loop.drain()


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", range(8))
def test_random_requests_leave_fail_and_are_preempted(seed: int) -> None:
    rng = random.Random(seed)
    loop, session = make(rng.choice([2, 3, 4]), rng.choice([52, 60, 90]))
    run_random_requests(rng, loop, session)
    assert loop.work.overlapped > 20


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("stages", "window", "blocks"),
    [
        (2, 0, [52]),
        (3, 0, [90]),
        (4, 0, [70]),
        (2, 6, [60, 24]),
        (3, 6, [90, 60]),
        (2, STATE_WINDOW, [70, 8 * STATE_SLOTS]),
        (3, STATE_WINDOW, [90, 30]),
        (4, STATE_WINDOW, [60, STATE_SLOTS]),
    ],
)
def test_random_long_prompts(stages: int, window: int, blocks: list[int]) -> None:
    """Prompts of up to six chunks, with equal heads, in groups of blocks that are too small for all; they come while
    others decode, and some leave in the middle."""
    rng = random.Random(repr((stages, window, blocks)))
    loop, session = make(stages, blocks, window, shuffle=rng)
    heads = [[rng.randrange(9) for _ in range(140)] for _ in range(3)]
    live: list[Request] = []
    for _ in range(60):
        head = rng.choice(heads)[: rng.choice([0, 3, 40, 97, 140])]
        live.append(request_of([*head, *(rng.randrange(9) for _ in range(rng.randrange(1, 40)))], rng.randrange(1, 20)))
        loop.add(live[-1:])
        for _ in range(rng.randrange(7)):
            loop.step()
        if rng.random() < 0.15:
            loop.abort([rng.choice(live[-4:])])
    loop.drain()
    check_ends(live)
    assert not any(request.num_under_way for request in live)
    assert loop.stats()["blocks_used"] == 0
    roomy = blocks[-1] > STATE_SLOTS  # else one request runs, with a slot for what it takes and one for what it leaves
    assert (loop.stats()["prefix_hit_tokens"] > 0) == roomy
    assert session.shared > 20


def test_a_close_ends_what_is_under_way() -> None:
    loop, session = make(3)
    requests = [request_of([1, n], 30) for n in range(6)]
    loop.add(requests)
    for _ in range(5):
        loop.step()
    loop.close(RequestError("closed"))
    assert session.closed
    assert not session.under_way
    assert all(request.finished for request in requests)
