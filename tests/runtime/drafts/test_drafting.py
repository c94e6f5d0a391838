"""Steps with drafts: the tokens of a request never depend on them, whatever is drafted; what pays is drafted."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ingot.configs.speculation import Speculation
from ingot.errors import RequestError, UsageError
from ingot.plan import Limits, window_blocks
from ingot.runtime.drafts import drafting as room
from ingot.runtime.drafts import lookup
from ingot.runtime.logits_rules import Rules
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Int32, StepBatch
from tests.runtime.fake_session import VOCAB, FakeSession, continued
from tests.runtime.tiny_engine import make_loop

LIMITS = Limits(max_batch_size=6, max_input_len=60, max_seq_len=80, max_num_tokens=48, max_logit_rows=48)
Drafter = Callable[[Int32, int], list[int]]


@pytest.fixture(autouse=True)
def _steps_take_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each, whatever its rows: what is drafted does not depend on the machine. See `keep_time`."""
    ticks = itertools.count()
    monkeypatch.setattr("ingot.runtime.step_loop.time.perf_counter", lambda: float(next(ticks)))


class DraftSession(FakeSession):
    takes_drafts = True


def right(tokens: Int32, most: int) -> list[int]:
    return continued(tokens.tolist(), most)


def wrong(tokens: Int32, most: int) -> list[int]:
    return [(token + 1) % VOCAB for token in continued(tokens.tolist(), most)]


def by_chance(tokens: Int32, most: int) -> list[int]:
    """Right up to some place."""
    source = random.Random(bytes(tokens))
    stop = source.randrange(most + 1)
    return right(tokens, most)[:stop] + [source.randrange(VOCAB) for _ in range(most - stop)]


def draft(monkeypatch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    def found(tokens: Int32, shortest: int, longest: int, most: int) -> tuple[Int32, int]:
        return np.array(drafter(tokens, most), np.int32), 4

    monkeypatch.setattr(lookup, "lookup", found)


def keep_time(monkeypatch: pytest.MonkeyPatch, session: FakeSession, seconds: Callable[[int], float]) -> None:
    """A step of so many tokens takes `seconds` of them; nothing else takes time."""
    clock, check = [0.0], session.before_step

    def wait(batch: StepBatch) -> None:
        clock[0] += seconds(len(batch.ids))
        check(batch)

    session.before_step = wait
    monkeypatch.setattr("ingot.runtime.step_loop.time.perf_counter", lambda: clock[0])


def request_of(prompt: list[int], count: int, **others: object) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, **others)  # type: ignore[arg-type]


def loop_of(
    session: FakeSession,
    limits: Limits = LIMITS,
    prefix_cache: bool = True,
    most: int = 5,
    windows: Sequence[int] = (0,),
    most_seconds: float = math.inf,
) -> StepLoop:
    _, scheduler, blocks = make_loop(session, limits, 4, prefix_cache=prefix_cache, windows=windows)
    drafting = room.Drafting(lookup.Lookup(Speculation()), most, limits, blocks, most_seconds)
    return StepLoop(session, scheduler, blocks, drafting)


@pytest.mark.parametrize("drafter", [right, wrong, by_chance], ids=lambda each: each.__name__)
@pytest.mark.parametrize("windows", [(0,), (0, 6), (0, 9, 5)])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_do_not_depend_on_drafts(
    drafter: Drafter, windows: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many requests that come at any time, with few blocks, so that some are preempted, and with windows."""
    draft(monkeypatch, drafter)
    source = random.Random(seed)
    blocks = [source.choice([21, 30, 200])] + [
        window_blocks(window, 4) + source.randrange(20) for window in windows[1:]
    ]
    session = DraftSession(blocks, 4, LIMITS, windows)
    loop = loop_of(session, LIMITS, source.random() < 0.7, source.randint(1, 9), windows)
    requests = [
        request_of([source.randrange(VOCAB) for _ in range(source.randint(1, 20))], source.randint(1, 50))
        for _ in range(14)
    ]
    left = list(requests)
    while left or loop.has_work:
        if left and source.random() < 0.4:
            loop.add([left.pop()])
        loop.step()
    for request in requests:
        prompt = request.tokens[: request.num_prompt].tolist()
        assert request.generated().tolist() == continued(prompt, request.max_new_tokens)
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.log_probs) == request.max_new_tokens
        assert request.log_probs == [-float(number) for number in range(request.max_new_tokens)], "a draw of each place"
    assert loop.stats()["blocks_used"] == 0
    tried = loop.work.drafted
    assert tried > 0
    share = loop.work.right_drafts / tried
    assert share == 1 if drafter is right else share == 0 if drafter is wrong else 0 < share < 1


def test_right_drafts_save_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, right)
    session = DraftSession(100, 4, LIMITS)
    loop = loop_of(session)
    loop.add([request_of([1, 2], 62)])
    loop.drain()
    assert loop.work.steps == 2 + 10, "the prompt, one step to learn its time, then six tokens in each"
    assert loop.step_log()[2:] == [[0, 6]] * 10


def test_wrong_drafts_are_given_up_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, wrong)
    limits = Limits(max_batch_size=6, max_input_len=60, max_seq_len=1000, max_num_tokens=48, max_logit_rows=48)
    session = DraftSession(300, 4, limits)
    loop = loop_of(session, limits)
    loop.add([request_of([1, 2], 900)])
    loop.drain()
    tried = [rows > 1 for _, rows in loop.step_log()]
    assert sum(tried) < 0.2 * len(tried)
    assert any(tried[-300:])


def test_drafts_that_do_not_pay_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of more rows takes as much longer: then even a draft that is nearly always right brings nothing."""
    draft(monkeypatch, right)
    session = DraftSession(100, 4, LIMITS)
    keep_time(monkeypatch, session, float)
    loop = loop_of(session)
    loop.add([request_of([1, 2], 62)])
    loop.drain()
    assert 0 < loop.work.drafted <= 10, "the first steps show what rows cost"


def test_requests_share_the_rows_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 24 rows cost nothing, and further ones more than a token is worth, which the first tries show."""
    draft(monkeypatch, right)
    session = DraftSession(200, 4, LIMITS)
    keep_time(monkeypatch, session, lambda rows: (max(rows, 24) / 24) ** 2)
    loop = loop_of(session)
    loop.add([request_of([1, number], 62) for number in range(6)])
    loop.drain()
    rows = [rows for prompts, rows in loop.step_log() if not prompts]
    assert max(rows) <= 36
    assert sum(20 <= each <= 26 for each in rows) > len(rows) // 2
    assert len(rows) < 62 // 3


def test_a_step_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, right)
    session = DraftSession(100, 4, LIMITS)
    keep_time(monkeypatch, session, lambda rows: 1.0 + 0.1 * rows)
    loop = loop_of(session, most_seconds=1.35)
    loop.add([request_of([1, 2], 62)])
    loop.drain()
    longest = [rows for _, rows in loop.step_log()]
    assert longest.count(3) > 5
    assert sum(rows > 3 for rows in longest) <= 2, "that such a step takes longer, a step has shown"


def test_a_request_with_a_logits_processor_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, right)
    loop = loop_of(DraftSession(100, 4, LIMITS))
    rules = Rules(processors=(lambda prompt, generated, logits: logits,))
    loop.add([request_of([1, 2], 30, rules=rules), request_of([3, 4], 30)])
    loop.drain()
    assert 0 < loop.work.drafted == loop.work.right_drafts
    assert loop.work.right_drafts < 30


def test_an_end_inside_drafts_ends_the_request_there(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, right)
    expected = continued([5, 6], 40)
    for place in (3, 4, 5, 9, 20):
        loop = loop_of(DraftSession(100, 4, LIMITS))
        ended = request_of([5, 6], 40, end_ids=frozenset({expected[place]}))
        worded = request_of([5, 6], 40, stop_words=[tuple(expected[place - 1 : place + 1])])
        loop.add([ended, worded])
        loop.drain()
        first = expected.index(expected[place])
        assert ended.generated().tolist() == expected[: first + 1]
        assert worded.generated().tolist() == expected[: place + 1]
        assert ended.finish_reason is worded.finish_reason is FinishReason.STOP
        assert len(worded.log_probs) == place + 1


def test_what_a_step_keeps_is_that_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, by_chance)
    session = DraftSession(100, 4, LIMITS)
    loop = loop_of(session)
    request = request_of([1, 2, 3], 50, want_generation_logits=True)
    loop.add([request])
    loop.drain()
    assert [int(row.argmax()) for row in request.generation_logits] == request.generated().tolist()
    assert loop.work.right_drafts > 0


def test_steps_with_prompts_have_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, right)
    loop = loop_of(DraftSession(100, 4, LIMITS))
    loop.add([request_of([1, 2], 60)])
    for _ in range(5):
        loop.step()
    loop.add([request_of([3] * 20, 4)])
    loop.step()
    assert loop.step_log()[-1] == [20, 1]
    loop.drain()


def test_a_step_has_no_more_rows_than_limits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake session checks every step."""
    draft(monkeypatch, right)
    limits = Limits(max_batch_size=4, max_input_len=20, max_seq_len=60, max_num_tokens=20, max_logit_rows=6)
    loop = loop_of(DraftSession(100, 4, limits), limits)
    loop.add([request_of([1, number], 40) for number in range(4)])
    loop.drain()
    assert max(rows for _, rows in loop.step_log()) == 6


def test_a_step_that_fails_with_drafts_is_repeated_for_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, right)
    session = DraftSession(100, 4, LIMITS)
    loop = loop_of(session)
    good, bad = request_of([1, 2], 30), request_of([3, 4], 30)
    poison = continued([3, 4], 30)[12]

    def fail(batch: StepBatch) -> None:
        for begin, end in zip(batch.query_starts, batch.query_starts[1:], strict=False):
            if poison in batch.ids[begin:end] and batch.past_lengths[0] + len(batch.ids) > 0 and end - begin > 1:
                raise ValueError("the kernel fell over")

    session.before_step = fail
    loop.add([good, bad])
    loop.drain()
    assert "fell over" in str(bad.error)
    assert poison in continued([1, 2], 30) or good.generated().tolist() == continued([1, 2], 30)


@pytest.mark.parametrize(
    ("session", "words"),
    [
        (FakeSession(10, 4, LIMITS), "fake computes no drafts"),
        (DraftSession((10, 10), 4, LIMITS, (0, 0), (False, True)), "keeps states"),
    ],
)
def test_where_drafts_cannot_be_is_said(session: FakeSession, words: str) -> None:
    windows = (0,) * len(session.num_blocks)
    _, _, blocks = make_loop(session, LIMITS, 4, windows=windows, strides=(0, 4)[: len(windows)])
    with pytest.raises(UsageError, match=words):
        room.check_session(session, "fake", blocks)


def test_an_aborted_request_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    draft(monkeypatch, by_chance)
    loop = loop_of(DraftSession(100, 4, LIMITS))
    requests = [request_of([1, number], 60) for number in range(3)]
    loop.add(requests)
    for _ in range(6):
        loop.step()
    loop.abort(requests[:2], RequestError("enough"))
    loop.drain()
    assert requests[2].generated().tolist() == continued([1, 2], 60)
    assert loop.stats()["blocks_used"] == 0
