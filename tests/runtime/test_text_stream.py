"""Events of a text: what belongs to which token, the end token included."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.generate_text import stream_text
from ingot.runtime.llm import EngineLLM
from ingot.runtime.outlet import Progress
from ingot.runtime.request import FinishReason
from ingot.runtime.text_stream import TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.tiny_engine import make_runner, ref_session
from tests.runtime.tiny_plan import VOCAB, make_model

PARAMS = SamplingParams(max_tokens=12, temperature=0, logprobs=1, prompt_logprobs=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineLLM]:
    model = make_model()
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)
    with EngineLLM(make_runner(model, ref_session(model, 100)), tokenizer) as llm:
        yield llm


def progress_of(stream: TextStream) -> Progress:
    return Progress(stream.request, stream.request.num_generated, stream.request.finished)


@pytest.fixture(scope="module")
def free(llm: EngineLLM) -> list[int]:
    return llm.generate("10", PARAMS)[0].outputs[0].token_ids


def ending(free: list[int]) -> SamplingParams:
    return dataclasses.replace(PARAMS, stop_token_ids=[free[5]], n=2)


def test_the_end_token_has_its_probabilities(llm: EngineLLM, free: list[int]) -> None:
    tokens = free[: free.index(free[5]) + 1]
    (result,) = llm.generate("10", ending(free))
    for output in result.outputs:
        assert output.token_ids == tokens
        assert output.logprobs is not None
        assert [next(iter(table)) for table in output.logprobs] == tokens
        total = sum(table[token].logprob for table, token in zip(output.logprobs, tokens, strict=True))
        assert output.cumulative_logprob == pytest.approx(total)


def test_every_completion_of_a_prompt_comes_with_the_prompts_probabilities(llm: EngineLLM, free: list[int]) -> None:
    (result,) = llm.generate("10", ending(free))
    assert result.prompt_logprobs is not None
    assert [table and next(iter(table)) for table in result.prompt_logprobs] == [None, *result.prompt_token_ids[1:]]


def test_events_say_which_token_is_no_text(llm: EngineLLM, free: list[int]) -> None:
    asked = [
        TextRequest(prompt="10", params=ending(free)),
        TextRequest(prompt="10", params=dataclasses.replace(ending(free), include_stop_str=True)),
        TextRequest(prompt="10", params=PARAMS),
    ]
    events = list(stream_text(llm.runner, llm.tokenizer, asked))
    last = {event.index: event for event in events if event.finish_reason is not None}
    assert [last[index].end_token for index in range(3)] == [True, False, False]
    assert [last[index].stop_reason for index in range(3)] == [free[5], free[5], None]
    for event in events:
        assert len(event.log_probs) == len(event.token_ids)
        assert event.logprobs is not None
        assert len(event.logprobs) == len(event.token_ids)
    told = [event for event in events if event.prompt_logprobs is not None]
    assert [(event.index, event.sequence) for event in told] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("least", [5, 6])
def test_a_stop_text_counts_from_the_least_number_of_tokens_on(llm: EngineLLM, free: list[int], least: int) -> None:
    """It ends with token 6, so five or six tokens at least are no reason to go on, and seven are."""
    text = llm.tokenizer.decode(free[5:6])
    places = [place for place, token in enumerate(free) if token == free[5]]
    params = dataclasses.replace(PARAMS, stop=text, min_tokens=least)
    expected = next(place + 1 for place in places if place + 1 >= least)
    assert len(llm.generate("10", params)[0].outputs[0].token_ids) == expected
    later = dataclasses.replace(params, min_tokens=7)
    assert len(llm.generate("10", later)[0].outputs[0].token_ids) == next(
        (place + 1 for place in places if place + 1 >= 7), 12
    )


def whole_and_half(folder: Path) -> Tokenizer:
    """One token is "a" with the first byte of é."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 2]
    table = {symbol: place for place, symbol in enumerate([*symbols, "Ã", "aÃ"])}
    hf = tokenizers.Tokenizer(models.BPE(table, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_dir(folder)


@pytest.mark.parametrize(("least", "found"), [(0, True), (1, True), (2, False)])
def test_a_stop_text_in_the_last_part_of_a_text_counts_as_any_other(
    llm: EngineLLM, least: int, found: bool, tmp_path: Path
) -> None:
    """The half character holds it back until somebody ends the request."""
    params = dataclasses.replace(PARAMS, stop="a", min_tokens=least, logprobs=None, prompt_logprobs=None)
    tokenizer = whole_and_half(tmp_path)
    (stream,) = make_streams(llm.runner, tokenizer, 0, TextRequest(prompt=[1], params=params))
    stream.request.append(VOCAB - 1, -1.0)
    assert stream.event(stream.new_tokens(progress_of(stream))).text == ""
    stream.request.finish_reason = FinishReason.ABORT
    event = stream.event(stream.new_tokens(progress_of(stream)))
    assert (event.text, event.stop_reason) == (("", "a") if found else ("a", None))
    assert event.finish_reason is (FinishReason.STOP if found else FinishReason.ABORT)


def test_what_fails_after_its_stop_text_has_not_failed(llm: EngineLLM) -> None:
    stop = llm.tokenizer.decode([5])
    params = dataclasses.replace(PARAMS, stop=stop, logprobs=None, prompt_logprobs=None)
    for tokens, expected in (([5, 6], FinishReason.STOP), ([6, 7], FinishReason.ABORT)):
        (stream,) = make_streams(llm.runner, llm.tokenizer, 0, TextRequest(prompt=[1], params=params))
        for token in tokens:
            stream.request.append(token, -1.0)
        stream.request.finish_reason, stream.request.error = FinishReason.ABORT, RequestError("the step failed")
        event = stream.event(stream.new_tokens(progress_of(stream)))
        assert event.finish_reason is expected
        assert (event.error is None) == (expected is FinishReason.STOP)
        assert stream.done
