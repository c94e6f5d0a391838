"""Several steps in one crossing: the same tokens; requests that come, go or end are seen after the step that runs."""

import dataclasses
import itertools
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.cpu.session import CpuSession
from ingot.plugins.registry import find_target
from ingot.runtime import step_loop
from ingot.runtime.reports import StepReport
from ingot.runtime.request import FinishReason
from ingot.step_io import LAST_DRAWN, Ahead, KnownTokens, SequenceRules, Session, StepBatch, StepResult
from tests.plugins.ops.draws import random_rules
from tests.runtime.fake_session import RepeatingSession, continued, run_singly
from tests.runtime.repeating import LIMITS, check, make, request_of, steps_of_calls
from tests.runtime.tiny_engine import make_loop, make_runner, open_session, poisoned_runner
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps count as short however loaded the machine is."""
    monkeypatch.setattr(step_loop, "_LONG_STEP", 60.0)
    monkeypatch.setattr(step_loop, "_CROSSING_SECONDS", 60.0)


def test_short_steps_come_several_at_a_time() -> None:
    loop, session = make()
    requests = [request_of([1, n], 100) for n in range(8)]
    loop.add(requests)
    loop.drain()
    assert max(session.repeated) > 8
    assert sum(session.repeated) > 90
    assert len(loop.step_log()) == 100
    assert loop.step_log()[1:] == [[0, 8]] * 99
    for request in requests:
        check(request)
        assert request.finish_reason is FinishReason.LENGTH
    assert loop.stats()["blocks_used"] == 0


def test_an_end_token_is_the_last_of_its_sequence_alone() -> None:
    first = continued([1, 0], 30)
    end = first[20]
    loop, session = make()
    ends, goes_on = request_of([1, 0], 100, frozenset([end])), request_of([1, 5], 100)
    loop.add([ends, goes_on])
    loop.drain()
    assert session.repeated
    assert ends.generated().tolist() == first[: first.index(end) + 1]
    assert ends.finish_reason is FinishReason.STOP
    assert goes_on.num_generated == 100
    check(goes_on)


def test_too_few_blocks_for_several_steps_are_enough_for_one() -> None:
    session = RepeatingSession(51, 4, LIMITS)  # one sequence of 200 and a bit
    loop, scheduler, _ = make_loop(session, LIMITS, 4)
    requests = [request_of([1, n], 190) for n in range(4)]
    loop.add(requests)
    loop.drain()
    for request in requests:
        check(request)
    assert session.repeated
    assert scheduler.preemptions > 0


def test_a_failure_in_the_middle_fails_whom_it_concerns(caplog: pytest.LogCaptureFixture) -> None:
    loop, session = make()
    bad_token = continued([1, 2], 20)[10]

    def fail(batch: StepBatch) -> None:
        if bad_token in batch.ids:
            raise ValueError("the kernel fell over")

    session.before_step = fail
    requests = [request_of([1, 2], 60), request_of([1, 3], 60)]
    loop.add(requests)
    loop.drain()
    assert isinstance(requests[0].error, RequestError)
    assert "a call of several steps failed" in caplog.text
    for request in requests:
        tokens = continued(request.tokens[:2].tolist(), 60)
        if bad_token in tokens[:-1]:
            assert request.error is not None
            assert request.generated().tolist() == tokens[: tokens.index(bad_token) + 1]
            assert len(request.log_probs) == request.num_generated
        else:
            assert request.generated().tolist() == tokens
    assert loop.stats()["blocks_used"] == 0


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return make_model(find_target("cpu"))


def _ahead(most: int, stop: int = 0, seconds: float = 60) -> Ahead:
    return Ahead(most_steps=most, seconds=seconds, stop=np.full(1, stop, np.int32))


def _prompts(rng: np.random.Generator, sequences: int) -> tuple[StepBatch, list[SequenceRules]]:
    """Random prompts, with blocks for 30 more tokens each, and rules of their draws."""
    lengths = rng.integers(1, 10, sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = StepBatch(
        ids=rng.integers(0, VOCAB, int(lengths.sum())).astype(np.int32),
        query_starts=starts,
        past_lengths=np.zeros(sequences, np.int32),
        block_tables=rng.permutation(sequences * 4).astype(np.int32).reshape(1, sequences, 4),
        logit_rows=starts[1:] - np.int32(1),
        slots=rng.permutation(8)[:sequences].astype(np.int32),
        draws=np.arange(sequences, dtype=np.int32),
    )
    return batch, [random_rules(rng, VOCAB) for _ in range(sequences)]


def _prefill(session: Session, prompts: StepBatch, rules: list[SequenceRules]) -> StepBatch:
    """The first decode step behind the prompts."""
    for slot, (begin, end), own in zip(
        prompts.slots.tolist(), itertools.pairwise(prompts.query_starts.tolist()), rules, strict=True
    ):
        session.start(slot, own, prompts.ids[begin:end], end - begin)
    session.run(prompts)
    one_each = np.arange(len(rules) + 1, dtype=np.int32)
    return dataclasses.replace(
        prompts,
        ids=np.full(len(rules), LAST_DRAWN, np.int32),
        query_starts=one_each,
        past_lengths=np.diff(prompts.query_starts).astype(np.int32),
        logit_rows=one_each[:-1],
    )


def _bits(result: StepResult) -> list[bytes]:
    arrays = (result.ids, result.log_probs, result.ends, result.token_ranks, result.top_ids, result.top_log_probs)
    return [b"" if array is None else array.tobytes() for array in arrays]


@pytest.mark.slow
@pytest.mark.native
def test_native_steps_that_follow_each_other_are_single_steps(model: TinyModel) -> None:
    counts = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sequences = int(rng.integers(1, 9))
        session = open_session(model, find_target("cpu"), sequences * 4)
        prompts, rules = _prompts(rng, sequences)
        rules = [own if own.max_tokens > 1 else SequenceRules() for own in rules]
        batch = _prefill(session, prompts, rules)
        try:
            expected = run_singly(session.run, batch, _ahead(30))
        except RequestError:  # one of them ended with the prompt's own draw
            session.close()
            continue
        counts.append(len(expected.ids))
        assert _bits(session.run(_prefill(session, prompts, rules), _ahead(30))) == _bits(expected)
        for cut in (_ahead(30, stop=1), _ahead(30, seconds=0)):
            once = session.run(_prefill(session, prompts, rules), cut)
            assert once.ids.tolist() == expected.ids[:1].tolist()
        session.close()
    assert 1 in counts
    assert max(counts) > 15
    assert len(set(counts)) > 8, "many a sequence has an end of its own"


@pytest.mark.native
def test_what_cannot_follow_itself_is_refused(model: TinyModel) -> None:
    session = open_session(model, find_target("cpu"), 8)
    prompts, _ = _prompts(np.random.default_rng(0), 2)
    batch = _prefill(session, prompts, [SequenceRules()] * 2)
    session.run(batch, _ahead(2))
    none = np.zeros(0, np.int32)
    known = KnownTokens(row=np.zeros(1, np.int32), token=np.zeros(1, np.int32), top=np.zeros(1, np.int32))
    for wrong_batch, wrong, why in [
        (batch, _ahead(0), "at least one step"),
        (batch, dataclasses.replace(_ahead(2), stop=none), "one entry"),
        (dataclasses.replace(batch, logit_rows=batch.logit_rows[:1], draws=batch.draws[:1]), _ahead(2), "one row of"),
        (dataclasses.replace(batch, draws=batch.draws[::-1].copy()), _ahead(2), "one draw"),
        (dataclasses.replace(batch, known=known), _ahead(2), "nothing else is wanted"),
        (dataclasses.replace(batch, want_logits=True), _ahead(2), "nothing else is wanted"),
        (prompts, _ahead(2), "one token"),
        (batch, _ahead(99), "the limit is 64"),
    ]:
        with pytest.raises(RequestError, match=why):
            session.run(wrong_batch, wrong)
    session.close()


@pytest.mark.native
@pytest.mark.parametrize("num_blocks", [8, 200])
def test_a_runner_gives_the_same_whether_it_repeats_or_not(
    model: TinyModel, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = steps_of_calls(monkeypatch)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(12)]
    arguments: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.9, "random_seed": 5, "return_dict": True}
    with poisoned_runner(model, find_target("cpu"), num_blocks) as runner:  # it runs one step at a time
        one = runner.generate(prompts, output_log_probs=True, **arguments)
    session = open_session(model, find_target("cpu"), num_blocks)
    with make_runner(model, session, shuffle=random.Random(1)) as runner:
        several = runner.generate(prompts, output_log_probs=True, **arguments)
    assert max(calls) > 1
    for key in ("output_ids", "log_probs", "sequence_lengths"):
        assert several[key].tobytes() == one[key].tobytes()


@pytest.mark.native
def test_native_steps_see_the_stop_of_another_thread(model: TinyModel) -> None:
    session = open_session(model, find_target("cpu"), 8)
    assert isinstance(session, CpuSession)
    batch = _prefill(session, _prompts(np.random.default_rng(0), 2)[0], [SequenceRules()] * 2)
    session.slow_down(0.01)  # per plan step
    ahead = _ahead(30)

    def stop_soon() -> None:
        time.sleep(0.05)
        ahead.stop[0] = 1

    thread = threading.Thread(target=stop_soon)
    thread.start()
    assert len(session.run(batch, ahead).ids) < 30
    thread.join()
    session.close()


def test_steps_that_come_at_a_time_share_its_seconds() -> None:
    loop, session = make()
    reports: list[StepReport] = []
    loop.on_step = reports.append
    loop.add([request_of([1, 2], 60)])
    loop.drain()
    assert max(session.repeated) > 4
    assert max(report.steps for report in reports) > 4
    assert sum(report.steps for report in reports) == loop.work.steps == 60
    seconds = sum(report.steps * report.session_seconds for report in reports)
    assert seconds == pytest.approx(loop.work.session_seconds)


@pytest.mark.native
def test_steps_whose_logits_are_wanted_go_singly_and_do_not_fail(
    model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with make_runner(model, open_session(model, find_target("cpu"), 40)) as runner:
        out = runner.generate([[1, 2, 3]], max_new_tokens=40, return_dict=True, output_context_logits=True)
    assert out["context_logits"][0].shape == (3, VOCAB)
    assert "failed" not in caplog.text
