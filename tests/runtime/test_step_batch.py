"""A step is made from the one before it only where that is right, and its results go where they belong."""

from typing import Any

import numpy as np

from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request
from ingot.runtime.step_batch import assemble, count_kinds, keep_results
from ingot.step_io import StepResult

SIZE = 4


def decoding(blocks: BlockManager, prompt: list[int], **more: Any) -> Request:
    """A request with one pending token."""
    request = Request(np.array(prompt, np.int32), max_new_tokens=20, **more)
    advance(blocks, request, 50)
    return request


def advance(blocks: BlockManager, request: Request, token: int) -> None:
    request.num_computed = request.num_tokens
    request.append(token, 0.0)
    assert blocks.reserve([(request.blocks, request.num_tokens)])


def test_a_table_that_has_become_shorter_ends_earlier() -> None:
    """As after several steps whose blocks were reserved ahead, and a preemption."""
    blocks = BlockManager((20,), SIZE)
    long, short = decoding(blocks, [1] * 11), decoding(blocks, [2])
    assert blocks.reserve([(short.blocks, 3 * SIZE)])
    before = assemble({long: 1, short: 1})
    assert (before.batch.block_tables >= 0).all()
    blocks.release(short.blocks)
    advance(blocks, long, 51)
    advance(blocks, short, 52)
    step = assemble({long: 1, short: 1}, before)
    assert step.batch.block_tables[0, 0].tolist() == [*long.blocks.ids[0].tolist()]
    width = step.batch.block_tables.shape[2]
    assert step.batch.block_tables[0, 1].tolist() == [*short.blocks.ids[0].tolist()] + [-1] * (width - 1)


def test_the_same_requests_in_another_order_are_another_step() -> None:
    blocks = BlockManager((20,), SIZE)
    first, second = decoding(blocks, [1]), decoding(blocks, [2, 3])
    before = assemble({first: 1, second: 1})
    step = assemble({second: 1, first: 1}, before)
    assert step.sampled == (second, first)
    assert step.batch.past_lengths.tolist() == [2, 1]


def test_tokens_of_a_prompt_are_known_in_its_own_step_alone() -> None:
    blocks = BlockManager((20,), SIZE)
    request = Request(np.array([1, 2, 3], np.int32), max_new_tokens=4, prompt_logprobs=0, logprobs=0)
    assert blocks.reserve([(request.blocks, 3)])
    before = assemble({request: 3})
    assert [token for _, _, token in before.known] == [2, 3]
    request.num_context_logits = 3
    advance(blocks, request, 50)
    step = assemble({request: 1}, before)
    assert step.known == ()
    assert step.batch.sample.probs is not None
    assert step.batch.sample.probs.given.tolist() == [-1]


def test_a_prompt_of_one_token_is_no_decode_row() -> None:
    blocks = BlockManager((20,), SIZE)
    assert count_kinds({Request(np.array([1], np.int32), max_new_tokens=4): 1}) == (1, 0)
    assert count_kinds({decoding(blocks, [1]): 1}) == (0, 1)


def test_logits_in_the_middle_of_a_prompt_are_not_those_of_a_generated_token() -> None:
    blocks = BlockManager((20,), SIZE)
    request = Request(
        np.array([1, 2, 3], np.int32), max_new_tokens=4, want_context_logits=True, want_generation_logits=True
    )
    assert blocks.reserve([(request.blocks, 3)])
    step = assemble({request: 2})
    logits = np.zeros((2, 5), np.float32)
    keep_results(step, StepResult(ids=np.empty(0, np.int32), log_probs=np.empty(0, np.float32), logits=logits))
    assert [len(rows) for rows in request.context_logits] == [2]
    assert request.generation_logits == []
