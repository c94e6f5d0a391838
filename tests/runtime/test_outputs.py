"""Arrays that grow while a request runs: what was given out stays as it was, and nothing comes twice."""

from typing import Any

import numpy as np

from ingot.runtime.outputs import Outputs, Wanted
from ingot.runtime.request import FinishReason, Request, TokenProbs
from ingot.step_io import Ending

WANTED = Wanted(as_dict=True, log_probs=True, cum_log_probs=True, logprobs=True)


def request_of(prompt: list[int], count: int) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, logprobs=1)


def grow(request: Request, count: int) -> None:
    """Tokens 0, 1, 2, ... with log probabilities -1, -2, -3, ..."""
    for token in range(request.num_generated, request.num_generated + count):
        top = np.array([token], np.int32), np.array([-1.0 - token], np.float32)
        request.token_probs.append(
            TokenProbs(token=token, log_prob=-1.0 - token, rank=1, top_ids=top[0], top_log_probs=top[1])
        )
        last = request.num_generated + 1 == request.max_new_tokens
        request.append(token, -1.0 - token, Ending.LENGTH if last else Ending.NONE)


def outputs_of(*requests: Request) -> Outputs:
    return Outputs(
        groups=[[request] for request in requests], num_return_sequences=1, wanted=WANTED, pad_id=7, vocab_size=500
    )


def collected(outputs: Outputs, shown: list[int] | None = None) -> dict[str, Any]:
    result = outputs.collect(shown)
    assert isinstance(result, dict)
    return result


def test_a_row_that_gets_longer_than_its_array_keeps_its_beginning() -> None:
    long, short = request_of([5, 6], 400), request_of([8], 400)
    outputs = outputs_of(long, short)
    for count in (3, 100, 290):
        grow(long, count)
        ids = collected(outputs)["output_ids"]
        assert ids[0, 0].tolist() == [5, 6, *range(long.num_generated)]
        assert ids[1, 0].tolist() == [8] + [7] * (ids.shape[2] - 1)


def test_pieces_of_a_stream_stay_as_they_were() -> None:
    request = request_of([5], 3)
    outputs = outputs_of(request)
    grow(request, 3)
    assert request.finish_reason is FinishReason.LENGTH
    pieces = [collected(outputs, [count]) for count in (1, 2, 3)]
    assert [piece["finish_reasons"] for piece in pieces] == [[[None]], [[None]], [["length"]]]
    assert [piece["log_probs"][0, 0].tolist() for piece in pieces] == [[-1, 0, 0], [-1, -2, 0], [-1, -2, -3]]
    assert [piece["cum_log_probs"][0, 0] for piece in pieces] == [-1, -3, -6]
    tables = [piece["logprobs"][0][0] for piece in pieces]
    assert [[next(iter(table)) for table in own] for own in tables] == [[0], [0, 1], [0, 1, 2]]
