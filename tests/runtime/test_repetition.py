"""What a crossing of several steps is told beforehand, and what requests have of it afterwards."""

from typing import Any

import numpy as np
import pytest

from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.repetition import Repetition
from ingot.runtime.request import Request
from ingot.runtime.rules import Rules
from ingot.runtime.step_batch import assemble
from ingot.step_io import Repeat, StepBatch
from tests.runtime.fake_session import VOCAB, FakeSession

LIMITS = Limits(max_batch_size=1, max_input_len=8, max_seq_len=40, max_num_tokens=8, max_logit_rows=1)


class Crossing(FakeSession):
    """A session that fails after so many steps of a crossing; None: it does not."""

    def __init__(self) -> None:
        super().__init__(10, 16, LIMITS)
        self.repeat: Repeat | None = None
        self.fails_after: int | None = None

    def decode(self, batch: StepBatch, repeat: Repeat) -> int:
        self.repeat = repeat
        repeat.ids[:] = np.arange(repeat.ids.size).reshape(repeat.ids.shape) % VOCAB
        repeat.log_probs[:] = -1
        repeat.done[0] = len(repeat.ids) - 1 if self.fails_after is None else self.fails_after
        if self.fails_after is not None:
            raise ValueError("the kernel fell over")
        return len(repeat.ids)


def begin(request: Request, tokens: list[int]) -> tuple[Repetition, Crossing]:
    """With so many generated tokens, the last of them pending."""
    for token in tokens:
        request.append(token, -1.0)
    request.num_computed = request.num_tokens - 1
    blocks = BlockManager((10,), 16)
    assert blocks.reserve([(request.blocks, 40)])
    crossing = Crossing()
    step, stop = assemble({request: 1}), np.zeros(1, np.int32)
    repetition = Repetition(crossing, step, most=6, seconds=1.0, stop=stop)
    return repetition, crossing


def request_of(**more: Any) -> Request:
    return Request(np.array([1, 2], np.int32), max_new_tokens=30, **more)


def test_a_course_begins_with_all_that_a_word_may_have_begun_with() -> None:
    for more in ({"stop_words": [(5, 6, 7)]}, {"rules": Rules(bad_words=((5, 6, 7), (5, 6)))}):
        repetition, crossing = begin(request_of(**more), [4, 5, 6])
        repetition.run()
        assert crossing.repeat is not None
        assert crossing.repeat.course is not None
        assert crossing.repeat.course.tails.tolist() == [5, 6]


def test_a_word_does_not_begin_in_the_prompt() -> None:
    repetition, crossing = begin(request_of(stop_words=[(2, 5, 7)]), [5])
    repetition.run()
    assert crossing.repeat is not None
    assert crossing.repeat.course is not None
    assert crossing.repeat.course.tails.tolist() == [5]


def test_all_but_the_last_step_is_settled() -> None:
    request = request_of()
    repetition, _ = begin(request, [4])
    assert repetition.run().ids.tolist() == [5]
    assert repetition.settle() == 5
    assert request.generated().tolist() == [4, 0, 1, 2, 3, 4]
    assert request.num_pending == 1


def test_what_came_before_a_failure_is_settled() -> None:
    request = request_of()
    repetition, crossing = begin(request, [4])
    crossing.fails_after = 2
    with pytest.raises(ValueError, match="fell over"):
        repetition.run()
    assert repetition.settle() == repetition.done == 2
    assert request.generated().tolist() == [4, 0, 1]
    assert request.num_pending == 1
