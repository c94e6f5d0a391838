"""Several steps in one crossing: the same tokens; requests that come, go or end are seen after the step that runs."""

import dataclasses
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.cpu.session import CpuSession
from ingot.plugins.registry import find_target
from ingot.runtime.reports import StepReport
from ingot.runtime.request import FinishReason
from ingot.step_io import Int32, Repeat, SampleRows, StepBatch
from tests.runtime.decode_by_run import decode_by_run
from tests.runtime.fake_session import RepeatingSession, continued
from tests.runtime.repeating import LIMITS, check, make, request_of, steps_of_calls
from tests.runtime.tiny_engine import make_loop, make_runner, open_session, poisoned_runner
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model

NEVER = np.zeros(1, np.int32)


def repeat_of(most: int, sequences: int, ends: list[Int32] | None = None, stop: Int32 = NEVER) -> Repeat:
    ends = [np.zeros(0, np.int32)] * sequences if ends is None else ends
    return Repeat(
        seconds=60,
        end_ids=np.concatenate(ends),
        end_starts=np.cumsum([0, *map(len, ends)], dtype=np.int32),
        stop=stop,
        ids=np.full((most, sequences), -7, np.int32),
        log_probs=np.full((most, sequences), -7, np.float32),
        done=np.zeros(1, np.int32),
    )


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
    assert "several steps at a time failed" in caplog.text
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


def _decoding(rng: np.random.Generator, session: CpuSession, sequences: int) -> StepBatch:
    """A first decode step behind random prompts that the session holds already; blocks for 30 more tokens."""
    size, width = 16, 4
    lengths = rng.integers(1, 10, sequences)
    tables = rng.permutation(sequences * width).astype(np.int32).reshape(sequences, width)
    ids = rng.integers(0, VOCAB, int(lengths.sum())).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sample = SampleRows(
        row=np.arange(sequences, dtype=np.int32),
        temperature=rng.choice([0, 0.8, 2], sequences).astype(np.float32),
        top_k=rng.choice([0, 5], sequences).astype(np.int32),
        top_p=rng.choice([1, 0.9], sequences).astype(np.float32),
        seed=rng.integers(0, 99, sequences).astype(np.uint64),
        counter=np.zeros(sequences, np.uint64),
    )
    prompts = StepBatch(
        ids=ids,
        query_starts=starts,
        past_lengths=np.zeros(sequences, np.int32),
        block_tables=tables,
        logit_rows=starts[1:] - np.int32(1),
        sample=sample,
    )
    assert size * width >= 20 + 30
    one_each = np.arange(sequences + 1, dtype=np.int32)
    return StepBatch(
        ids=session.run(prompts).ids,
        query_starts=one_each,
        past_lengths=lengths.astype(np.int32),
        block_tables=tables,
        logit_rows=one_each[:-1],
        sample=dataclasses.replace(sample, counter=sample.counter + np.uint64(1)),
    )


@pytest.mark.native
@pytest.mark.parametrize("seed", range(6))
def test_native_steps_that_follow_each_other_are_single_steps(model: TinyModel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = int(rng.integers(1, 9))
    session = open_session(model, find_target("cpu"), sequences * 4)
    assert isinstance(session, CpuSession)
    batch = _decoding(rng, session, sequences)
    ends = [rng.integers(0, VOCAB, rng.integers(0, 2)).astype(np.int32) for _ in range(sequences)]
    expected, got = repeat_of(30, sequences, ends), repeat_of(30, sequences, ends)
    count = session.decode(batch, got)
    assert count == decode_by_run(session, batch, expected)
    assert got.ids.tobytes() == expected.ids.tobytes()
    assert got.log_probs.tobytes() == expected.log_probs.tobytes()
    assert got.done[0] == expected.done[0] == count - 1
    assert (got.ids[count:] == -7).all()
    stopped = dataclasses.replace(repeat_of(30, sequences, ends), stop=np.ones(1, np.int32))
    late = dataclasses.replace(repeat_of(30, sequences, ends), seconds=0.0)
    for cut in (stopped, late):
        assert session.decode(batch, cut) == 1
        assert cut.ids[0].tolist() == expected.ids[0].tolist()
        assert cut.done[0] == 0
    session.close()


@pytest.mark.native
def test_what_cannot_follow_itself_is_refused(model: TinyModel) -> None:
    session = open_session(model, find_target("cpu"), 8)
    assert isinstance(session, CpuSession)
    batch = _decoding(np.random.default_rng(0), session, 2)
    no_ends = np.zeros(0, np.int32)
    repeat = repeat_of(2, 2)
    session.decode(batch, repeat)
    swapped = dataclasses.replace(batch.sample, row=batch.sample.row[::-1].copy())
    for wrong_batch, wrong, why in [
        (batch, repeat_of(0, 2), "at least one step"),
        (batch, repeat_of(99, 2), "the limit is 64"),
        (batch, repeat_of(2, 3), "end_starts|one entry per step"),
        (batch, dataclasses.replace(repeat, ids=repeat.ids[:1]), "one entry per step"),
        (batch, dataclasses.replace(repeat, log_probs=repeat.log_probs[0]), "incompatible"),
        (batch, dataclasses.replace(repeat, end_starts=np.zeros(2, np.int32)), "end_starts"),
        (batch, dataclasses.replace(repeat, end_starts=np.array([0, 3, 0], np.int32)), "end_starts"),
        (batch, dataclasses.replace(repeat, stop=no_ends), "one entry each"),
        (batch, dataclasses.replace(repeat, done=no_ends), "one entry each"),
        (dataclasses.replace(batch, logit_rows=batch.logit_rows[:1]), repeat, "one row of logits"),
        (dataclasses.replace(batch, sample=swapped), repeat, "that of sequence s"),
    ]:
        with pytest.raises(RequestError, match=why):
            session.decode(wrong_batch, wrong)
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
    batch = _decoding(np.random.default_rng(0), session, 2)
    session.slow_down(0.01)  # per plan step
    stop = np.zeros(1, np.int32)
    repeat = repeat_of(30, 2, stop=stop)

    def stop_soon() -> None:
        time.sleep(0.05)
        stop[0] = 1

    thread = threading.Thread(target=stop_soon)
    thread.start()
    assert session.decode(batch, repeat) < 30
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
