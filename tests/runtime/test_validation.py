"""What callers ask is checked against the model: the last value that is allowed, and the first that is not."""

import dataclasses

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import IngotError
from ingot.plan import Limits
from ingot.runtime.request import MAX_PRIORITY, Request
from ingot.runtime.validation import ModelInfo, make_requests, read_ids, read_priority

LIMITS = Limits(max_batch_size=4, max_input_len=8, max_seq_len=12, max_num_tokens=8, max_logit_rows=4)
INFO = ModelInfo(vocab_size=10, limits=LIMITS, max_positions=99, end_ids=frozenset((3,)), pad_id=0)
PARAMS = SamplingParams(max_tokens=4)


def requests(params: SamplingParams) -> list[Request]:
    return make_requests(read_ids([1, 2], INFO.vocab_size, "prompt 0"), params, INFO, where="prompt 0")


def test_top_k_of_minus_one_is_no_limit() -> None:
    assert [requests(dataclasses.replace(PARAMS, top_k=k))[0].top_k for k in (-1, 0, 5)] == [0, 0, 5]


def test_tokens_are_those_of_the_vocabulary() -> None:
    assert read_ids([0, 9], 10, "prompt 0").tolist() == [0, 9]
    assert requests(dataclasses.replace(PARAMS, stop_token_ids=[0, 9]))[0].end_ids == {0, 3, 9}
    for wrong in (-1, 10, 1 << 64, -(1 << 70)):
        with pytest.raises(IngotError, match="outside the vocabulary"):
            read_ids([0, wrong], 10, "prompt 0")
        with pytest.raises(IngotError, match="stop_token_ids"):
            requests(dataclasses.replace(PARAMS, stop_token_ids=[wrong]))


def test_the_least_number_of_tokens_may_be_the_most() -> None:
    assert requests(dataclasses.replace(PARAMS, min_tokens=4))[0].rules.min_tokens == 4
    with pytest.raises(IngotError, match="at least than at most"):
        requests(dataclasses.replace(PARAMS, min_tokens=11, max_tokens=None))


@pytest.mark.parametrize("priority", [-MAX_PRIORITY, 0, MAX_PRIORITY])
def test_priorities_go_both_ways(priority: int) -> None:
    assert read_priority(priority, None) == (priority, "")


@pytest.mark.parametrize("priority", [-MAX_PRIORITY - 1, MAX_PRIORITY + 1])
def test_priorities_have_an_end(priority: int) -> None:
    with pytest.raises(IngotError, match="priority"):
        read_priority(priority, None)
