"""Prompts as text: pieces add up to the whole, faults stay with their request."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest

from ingot.configs.generation import GenerationDefaults, read_generation_defaults
from ingot.configs.sampling import SamplingParams
from ingot.errors import ConfigError, RequestError
from ingot.runtime.generate_text import complete_text, stream_text
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import FinishReason
from ingot.runtime.text_stream import TextEvent, TextRequest
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.server.served import eventually
from tests.runtime.tiny_engine import make_runner, ref_session
from tests.runtime.tiny_plan import VOCAB, make_model

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """51 tokens: the bytes of a few characters, some of them halves of é and 你."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = make_model()
    return make_runner(model, ref_session(model, 100), eos_ids=(4,))


def test_pieces_make_up_the_completion(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    asked = [TextRequest(prompt=prompt, params=GREEDY) for prompt in ("10/3", "é", [5, 6, 7])]
    events = list(stream_text(runner, tokenizer, asked))
    whole = complete_text(runner, tokenizer, asked)
    assert [completion.index for completion in whole] == [0, 1, 2]
    for completion in whole:
        own = [event for event in events if event.index == completion.index]
        assert "".join(event.text for event in own) == completion.text
        assert tuple(token for event in own for token in event.token_ids) == completion.token_ids
        assert len(completion.token_ids) == 8
        assert completion.finish_reason == "length"
        assert completion.error is None
        assert [event.finish_reason for event in own[:-1]] == [None] * (len(own) - 1)
    ids = tokenizer.encode("10/3")
    expected = runner.generate([ids], max_new_tokens=8, end_id=-1)[0, 0, len(ids) :]
    assert whole[0].token_ids == tuple(expected.tolist())


def test_end_token_is_no_text(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    free = complete_text(runner, tokenizer, [TextRequest(prompt="10", params=GREEDY)])[0]
    params = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=[free.token_ids[3]])
    ended = complete_text(runner, tokenizer, [TextRequest(prompt="10", params=params)])[0]
    assert ended.finish_reason == "stop"
    first = free.token_ids.index(free.token_ids[3])
    assert ended.token_ids == free.token_ids[: first + 1]
    detokenizer = tokenizer.detokenizer(tokenizer.encode("10"))
    assert ended.text == detokenizer.push(free.token_ids[:first]) + detokenizer.finish()


def test_a_refused_prompt_touches_no_other(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    asked = [TextRequest(prompt=prompt, params=GREEDY) for prompt in ("1", [60], "1" * 49, "2")]
    whole = complete_text(runner, tokenizer, asked)
    assert [type(completion.error) for completion in whole] == [type(None), RequestError, RequestError, type(None)]
    assert [completion.finish_reason for completion in whole] == ["length", "abort", "abort", "length"]
    assert whole[0].token_ids == complete_text(runner, tokenizer, asked[:1])[0].token_ids


def test_several_sequences(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=6, temperature=2.0, n=3, seed=4)
    whole = complete_text(runner, tokenizer, [TextRequest(prompt="1", params=params)])
    assert [completion.sequence for completion in whole] == [0, 1, 2]
    assert len({completion.token_ids for completion in whole}) > 1


def test_a_dropped_stream_aborts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    session = ref_session(model, 100)
    run, dropped = session.run, threading.Event()

    def hold(batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        if any(batch.past_lengths):
            dropped.wait(20)  # no request ends before its stream is dropped, however late
        return run(batch, ahead)

    monkeypatch.setattr(session, "run", hold)
    runner = make_runner(model, session)
    try:
        stream = stream_text(runner, tokenizer, [TextRequest(prompt="1", params=GREEDY)] * 3)
        first: TextEvent = next(stream)
        assert first.finish_reason is None
        assert eventually(lambda: runner.executor.beat.stats["blocks_used"] > 0)
        del stream
        dropped.set()
        assert runner.stats()["blocks_used"] == runner.stats()["requests_running"] == 0
    finally:
        dropped.set()


def test_max_tokens_none_goes_to_the_limit(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    events = list(stream_text(runner, tokenizer, [TextRequest(prompt=[1] * 40, params=params)]))
    assert sum(len(event.token_ids) for event in events) == 25
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_stop_texts_end_a_request_wherever_tokens_do(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    free = complete_text(runner, tokenizer, [TextRequest(prompt="10", params=GREEDY)])[0]
    stop = free.text[2:4]  # two tokens of one character each
    end = free.text.index(stop)
    for include in (False, True):
        params = dataclasses.replace(GREEDY, stop=["never", stop], include_stop_str=include)
        events = list(stream_text(runner, tokenizer, [TextRequest(prompt="10", params=params)]))
        assert "".join(event.text for event in events) == free.text[: end + 2 if include else end]
        assert events[-1].finish_reason is FinishReason.STOP
        assert events[-1].stop_reason == stop
        tokens = tuple(token for event in events for token in event.token_ids)
        assert tokens == free.token_ids[: len(tokens)]
        assert len(tokens) < len(free.token_ids)
    assert runner.stats()["blocks_used"] == 0
    late = dataclasses.replace(GREEDY, stop=free.text[0], min_tokens=8)
    whole = complete_text(runner, tokenizer, [TextRequest(prompt="10", params=late)])[0]
    assert len(whole.token_ids) == 8


def test_bad_words_are_texts(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    free = complete_text(runner, tokenizer, [TextRequest(prompt="10", params=GREEDY)])[0]
    word = free.text[1:3]
    params = dataclasses.replace(GREEDY, bad_words=[word])
    other = complete_text(runner, tokenizer, [TextRequest(prompt="10", params=params)])[0]
    assert word not in other.text
    assert other.token_ids[:2] == free.token_ids[:2]


def test_logprobs_of_texts(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=0)
    events = list(stream_text(runner, tokenizer, [TextRequest(prompt="10/", params=params)]))
    first = events[0].prompt_logprobs
    assert first is not None
    assert first[0] is None
    assert [[entry.decoded for entry in table.values()] for table in first[1:] if table] == [["0"], ["/"]]
    tables = [table for event in events for table in event.logprobs or ()]
    tokens = [token for event in events for token in event.token_ids]
    assert [next(iter(table)) for table in tables] == tokens
    assert [table[token].rank for table, token in zip(tables, tokens, strict=True)] == [1] * 8
    assert all(entry.decoded == tokenizer.token_text(token) for table in tables for token, entry in table.items())


def write(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_generation_defaults(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    assert read_generation_defaults(tmp_path).resolve(None, None, None) == (0.0, 0, 1.0)
    assert read_generation_defaults(tmp_path).resolve(None, 5, None) == (1.0, 5, 1.0)
    write(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        repetition_penalty=1.05,
        typical_p=0.9,
        eos_token_id=[1, 2],
    )
    defaults = read_generation_defaults(tmp_path)
    assert defaults.resolve(None, None, None) == (0.6, 0, 0.9)
    assert defaults.resolve(0, None, None) == (0, 0, 0.9)
    assert defaults.others == {"repetition_penalty": 1.05}
    assert defaults.not_followed == ("typical_p=0.9",)
    write(tmp_path, do_sample=False, temperature=0.6)
    assert read_generation_defaults(tmp_path).resolve(None, None, None) == (0.0, 0, 1.0)
    with pytest.raises(ConfigError, match="temperature"):
        read_generation_defaults(write(tmp_path, temperature="hot"))
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_generation_defaults(tmp_path)
