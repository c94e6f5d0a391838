"""Steps of decoding requests that follow each other in one crossing.

session   step 0 ─ step 1 ─ step 2 ─ step 3 ─ step 4 ─ the last one
             └────────────────────────────────┤             └── run() ──▶ a StepResult, as of any other step
requests                                   settle()
"""

from collections.abc import Sequence

import numpy as np

from ingot.runtime.request import Request
from ingot.runtime.step_batch import ScheduledStep, token_probs
from ingot.step_io import Course, Int32, Repeat, RepeatProbs, RepeatSession, StepResult

_MOST_BYTES = 64 << 20  # that one crossing may fill: with all of a vocabulary wanted, a step of a request makes 1 MiB


class Repetition:
    """One crossing."""

    def __init__(self, session: RepeatSession, step: ScheduledStep, *, most: int, seconds: float, stop: Int32) -> None:
        """At most `most` steps, none that begins after `seconds`, and none after the one in which `stop` becomes 1."""
        self._session, self._step = session, step
        requests, sample = step.sampled, step.batch.sample
        top = 0 if sample.probs is None else int(sample.probs.top_starts[-1])
        most = max(1, min(most, _MOST_BYTES // (12 * len(requests) + 8 * top)))
        end_starts, end_ids = _parts([sorted(request.end_ids) for request in requests])
        self._repeat = Repeat(
            seconds=seconds,
            end_starts=end_starts,
            end_ids=end_ids,
            course=_course(requests),
            stop=stop,
            ids=np.empty((most, len(requests)), dtype=np.int32),
            log_probs=np.empty((most, len(requests)), dtype=np.float32),
            probs=None if sample.probs is None else _probs(most, len(requests), top),
            done=np.zeros(1, dtype=np.int32),
        )

    @property
    def done(self) -> int:
        """Steps that have ended and were not the last."""
        return int(self._repeat.done[0])

    def run(self) -> StepResult:
        """Run all steps; the last one's result, as if it had been the only one."""
        return self._result(self._session.decode(self._step.batch, self._repeat) - 1)

    def settle(self) -> int:
        """Give the requests what the steps brought that are `done`; how many there are."""
        done = self.done
        tokens, log_probs = self._repeat.ids[:done].T, self._repeat.log_probs[:done].T.tolist()
        requests: tuple[Request, ...] = self._step.sampled
        if self._repeat.probs is not None:
            for result in map(self._result, range(done)):
                for request, own in zip(requests, token_probs(self._step, result), strict=True):
                    if request.logprobs is not None:
                        request.token_probs.append(own)
        for request, own_tokens, own_log_probs in zip(requests, tokens, log_probs, strict=True):
            request.catch_up(own_tokens, own_log_probs)
        return done

    def _result(self, step: int) -> StepResult:
        """Of the step that has so many before it."""
        ids, log_probs, probs = self._repeat.ids[step], self._repeat.log_probs[step], self._repeat.probs
        if probs is None:
            return StepResult(ids=ids, log_probs=log_probs)
        return StepResult(
            ids=ids,
            log_probs=log_probs,
            ranks=probs.ranks[step],
            top_ids=probs.top_ids[step],
            top_log_probs=probs.top_log_probs[step],
        )


def _course(requests: Sequence[Request]) -> Course | None:
    if all([request.rules.lasting and not request.stop_words for request in requests]):
        return None
    tail_starts, tails = _parts([_tail(request) for request in requests])
    bad_starts, bad_words = _parts([request.rules.long_word_tokens for request in requests])
    stop_starts, stop_words = _parts([[t for word in r.stop_words for t in (*word, -1)] for r in requests])
    return Course(
        num_lasting=np.array([len(request.rules.always[0]) for request in requests], dtype=np.int32),
        min_steps=np.array(
            [max(0, request.rules.min_tokens - request.num_generated) for request in requests], dtype=np.int32
        ),
        tails=tails,
        tail_starts=tail_starts,
        bad_words=bad_words,
        bad_word_starts=bad_starts,
        stop_words=stop_words,
        stop_word_starts=stop_starts,
    )


def _tail(request: Request) -> list[int]:
    """The generated tokens with which a word may begin."""
    reach = max([len(word) - 1 for word in (*request.rules.long_words, *request.stop_words)], default=0)
    begin = max(request.num_prompt, request.num_tokens - reach)
    tail: list[int] = request.tokens[begin : request.num_tokens].tolist()
    return tail


def _parts(parts: Sequence[Sequence[int] | Int32]) -> tuple[Int32, Int32]:
    """Where each begins and the last one ends, and all of them."""
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    return starts, np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def _probs(most: int, sequences: int, top: int) -> RepeatProbs:
    return RepeatProbs(
        ranks=np.empty((most, sequences), dtype=np.int32),
        top_ids=np.empty((most, top), dtype=np.int32),
        top_log_probs=np.empty((most, top), dtype=np.float32),
    )
