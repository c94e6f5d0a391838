"""A step is made from the one before it only where that is right, and its results go where they belong."""

from typing import Any

import numpy as np

from ingot.runtime.block_manager import BlockManager
from ingot.runtime.request import Request
from ingot.runtime.step_batch import assemble, catch_up, count_kinds, keep_results
from ingot.step_io import LAST_DRAWN, StepResult

SIZE = 4


def decoding(blocks: BlockManager, prompt: list[int], **more: Any) -> Request:
    """A request with one pending token."""
    request = Request(np.array(prompt, np.int32), max_new_tokens=20, **more)
    request.slot = len(prompt)
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
    request.slot = 0
    assert blocks.reserve([(request.blocks, 3)])
    before = assemble({request: 3})
    assert [token for _, _, token in before.known] == [2, 3]
    request.num_context_logits = 3
    advance(blocks, request, 50)
    step = assemble({request: 1}, before)
    assert step.known == ()
    assert step.batch.known is None
    assert step.keeps


def test_a_prompt_of_one_token_is_no_decode_row() -> None:
    blocks = BlockManager((20,), SIZE)
    assert count_kinds({Request(np.array([1], np.int32), max_new_tokens=4): 1}) == (1, 0)
    assert count_kinds({decoding(blocks, [1]): 1}) == (0, 1)


def test_logits_in_the_middle_of_a_prompt_are_not_those_of_a_generated_token() -> None:
    blocks = BlockManager((20,), SIZE)
    request = Request(
        np.array([1, 2, 3], np.int32), max_new_tokens=4, want_context_logits=True, want_generation_logits=True
    )
    request.slot = 0
    assert blocks.reserve([(request.blocks, 3)])
    step = assemble({request: 2})
    logits = np.zeros((2, 5), np.float32)
    nothing = np.empty((1, 0), np.int32)
    keep_results(
        step, StepResult(ids=nothing, log_probs=nothing.astype(np.float32), ends=np.empty(0, np.int32), logits=logits)
    )
    assert [len(rows) for rows in request.context_logits] == [2]
    assert request.generation_logits == []


def test_a_decoding_request_leaves_its_token_to_the_session() -> None:
    blocks = BlockManager((20,), SIZE)
    decodes, prompt = decoding(blocks, [1]), Request(np.array([8, 9], np.int32), max_new_tokens=4)
    prompt.slot = 0
    assert blocks.reserve([(prompt.blocks, 2)])
    step = assemble({decodes: 1, prompt: 1})
    assert step.batch.ids.tolist() == [LAST_DRAWN, 8]
    assert step.batch.slots.tolist() == [1, 0]
    assert step.batch.draws.tolist() == [0], "the prompt goes on"


def test_all_but_the_last_of_several_steps_are_caught_up() -> None:
    request = decoding(BlockManager((20,), SIZE), [1, 2], logprobs=1)
    step = assemble({request: 1})
    column = np.arange(5, dtype=np.int32)[:, None]
    several = StepResult(
        ids=column + 10,
        log_probs=-column.astype(np.float32),
        ends=np.zeros(1, np.int32),
        token_ranks=column + 1,
        top_ids=column + 20,
        top_log_probs=column.astype(np.float32),
    )
    catch_up(step, several)
    assert request.generated().tolist() == [50, 10, 11, 12, 13]
    assert request.num_pending == 1
    assert request.log_probs == [0, 0, -1, -2, -3]
    assert [(own.token, own.rank, own.top_ids.tolist()) for own in request.token_probs] == [
        (10 + n, 1 + n, [20 + n]) for n in range(4)
    ]
