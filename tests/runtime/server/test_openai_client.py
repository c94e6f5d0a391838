"""The official client against the server: what it gets is what ModelRunner computes, in OpenAI's types."""

import asyncio
import json
import re
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.runtime.server.served import Served, eventually

pytestmark = pytest.mark.native
MESSAGES: Any = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Once upon a time"}]


def greedy(served: Served, prompts: list[list[int]], count: int) -> list[str]:
    """What ModelRunner makes of prompts, as text."""
    out = served.runner.generate(prompts, max_new_tokens=count, return_dict=True)
    texts = []
    for prompt, ids, lengths in zip(prompts, out["output_ids"], out["sequence_lengths"], strict=True):
        detokenizer = served.service.tokenizer.detokenizer(prompt)
        tokens = [
            token
            for token in ids[0, len(prompt) : lengths[0]].tolist()
            if token not in served.runner.model_info.end_ids
        ]
        texts.append(detokenizer.push(tokens) + detokenizer.finish())
    return texts


def strictly(kind: Any, value: Any) -> None:
    """Every field of OpenAI's type is there, of the right type, and none besides."""
    document = value.model_dump(exclude_unset=True)
    kind.model_validate(document, strict=True)
    assert not value.model_extra


def text_prompts(count: int) -> list[str]:
    names = ("prince", "count", "princess", "soldier", "general", "old man", "officer", "doctor")
    return [f"The {names[place % 8]} looked at {names[place // 8 % 8]}" for place in range(count)]


def test_completions_of_all_kinds_of_prompts(served: Served) -> None:
    client, tokenizer = served.client(), served.service.tokenizer
    texts = text_prompts(3)
    ids = [tokenizer.encode(text) for text in texts]
    expected = greedy(served, ids, 12)
    for prompt, count in ((texts[0], 1), (ids[0], 1), (texts, 3), (ids, 3)):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        strictly(Completion, answer)
        assert [choice.text for choice in answer.choices] == expected[:count]
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids[:count]))
        assert answer.usage.completion_tokens == 12 * count
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streams_say_the_same_as_whole_answers(served: Served) -> None:
    client = served.client()
    options: Any = {"model": "tiny", "prompt": text_prompts(2), "max_tokens": 20, "temperature": 0.8, "seed": 5, "n": 2}
    whole = client.completions.create(**options)
    texts, reasons, usage = [""] * 4, [""] * 4, None
    for piece in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) > 1
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat(served: Served) -> None:
    client = served.client()
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=9, temperature=0, logprobs=True, top_logprobs=2
    )
    strictly(ChatCompletion, answer)
    (choice,) = answer.choices
    ids = served.service.tokenizer.encode(served.service.templates.render(MESSAGES))
    assert [choice.message.content] == greedy(served, [ids], 9)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(each.token for each in content) == choice.message.content
    for each in content:
        assert bytes(each.bytes or []).decode() == each.token
        assert each.top_logprobs[0].token == each.token, "greedy takes the likeliest"
        assert each.top_logprobs[0].logprob == each.logprob > each.top_logprobs[1].logprob
    pieces = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, temperature=0, logprobs=True, top_logprobs=2, stream=True
        )
    )
    for piece in pieces:
        strictly(ChatCompletionChunk, piece)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content
    assert [each for piece in pieces if (found := piece.choices[0].logprobs) for each in found.content or []] == content
    assert pieces[-1].choices[0].finish_reason == "length"


def test_echo_with_logprobs_scores_a_prompt(served: Served) -> None:
    client, text = served.client(), "The prince looked at the count"
    ids = served.service.tokenizer.encode(text)
    answer = client.completions.create(model="tiny", prompt=text, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == text
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    scores = choice.logprobs.token_logprobs or []
    (result,) = served.runner.generate([ids], max_new_tokens=1, return_dict=True, output_context_logits=True)[
        "context_logits"
    ]
    expected = [row[token] - (row.max() + _log_sum(row)) for row, token in zip(result, ids[1:], strict=False)]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected, abs=1e-4)
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert all(text[offset:].startswith(token) for token, offset in zip(tokens[1:], offsets[1:], strict=True))
    # streamed, and with tokens after it, the beginning is the same
    longer = client.completions.create(model="tiny", prompt=text, max_tokens=4, temperature=0, echo=True, logprobs=1)
    pieces = list(
        client.completions.create(
            model="tiny", prompt=ids, max_tokens=4, temperature=0, echo=True, logprobs=1, stream=True
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces) == longer.choices[0].text
    assert longer.choices[0].text.startswith(text)
    streamed = [each for piece in pieces if (found := piece.choices[0].logprobs) for each in found.token_logprobs or []]
    assert longer.choices[0].logprobs is not None
    assert streamed == longer.choices[0].logprobs.token_logprobs
    assert streamed[: len(scores)] == scores


def test_places_of_tokens_count_characters(served: Served) -> None:
    """Of a character in several tokens too: they all stand where it stands."""
    text = "The \u00e9 \u4f60\u597d \U0001f600 prince"
    answer = served.client().completions.create(
        model="tiny", prompt=text, max_tokens=20, temperature=2, seed=1, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert "\ufffd" in tokens, "the tokenizer has no token for some of these characters"
    whole = [(token, offset) for token, offset in zip(tokens[1:], offsets[1:], strict=True) if "\ufffd" not in token]
    assert [token for token, offset in whole if not choice.text[offset:].startswith(token)] == []
    assert offsets == sorted(offsets)
    halves = {offset for token, offset in zip(tokens, offsets, strict=True) if token == "\ufffd"}
    assert {choice.text[offset] for offset in halves} >= {"\u00e9", "\u4f60", "\u597d", "\U0001f600"}


def _log_sum(row: Any) -> Any:
    return np.log(np.exp(row - row.max()).sum())


@pytest.mark.slow
def test_what_bears_on_the_draws(served: Served) -> None:
    client, tokenizer = served.client(), served.service.tokenizer

    def complete(**options: Any) -> CompletionChoice:
        base: dict[str, Any] = {"model": "tiny", "prompt": "The prince", "max_tokens": 24, "temperature": 0}
        choice: CompletionChoice = client.completions.create(**{**base, **options}).choices[0]
        return choice

    free = complete()
    stop = free.text[10:13]
    assert complete(stop=[stop]).text == free.text[: free.text.index(stop)]
    assert complete(stop=stop).finish_reason == "stop"
    assert complete(stop=stop, extra_body={"include_stop_str_in_output": True}).text.endswith(stop)
    token = tokenizer.encode(free.text, add_special_tokens=False)[1]
    assert tokenizer.token_text(token) not in complete(logit_bias={str(token): -100}).text[:6]
    assert complete(frequency_penalty=2.0).text != free.text
    assert complete(presence_penalty=2.0).text != free.text
    assert complete(extra_body={"repetition_penalty": 1.5}).text != free.text
    hot = {"temperature": 1.5, "seed": 3}
    assert complete(**hot).text == complete(**hot).text != complete(**{**hot, "seed": 4}).text
    assert complete(**hot, extra_body={"top_k": 1}).text == free.text
    assert complete(**hot, top_p=1e-6).text == free.text
    assert complete(**hot, extra_body={"min_p": 1.0}).text == free.text
    assert complete(seed=-1).text == free.text
    banned = complete(extra_body={"bad_words": [free.text[:6].strip()]})
    assert not banned.text.startswith(free.text[:6])
    by_token = complete(extra_body={"stop_token_ids": [token], "min_tokens": 1})
    assert free.text.startswith(by_token.text)
    assert by_token.finish_reason == "stop"
    long = complete(max_tokens=80, extra_body={"ignore_eos": True, "priority": -5, "cache_salt": "mine"})
    assert long.finish_reason == "length"


@pytest.mark.daily(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_tell_what_stopped_them(served: Served, path: str, stream: bool) -> None:
    """vLLM's field: the stop text, or the token of stop_token_ids; null at a limit or an end token of the model."""
    prompt: Any = {"messages": MESSAGES} if "chat" in path else {"prompt": "The prince"}

    def ask(http: Any, **fields: Any) -> Any:
        body = {**prompt, "max_tokens": 24, "temperature": 0, "stream": stream, "ignore_eos": True, **fields}
        answer = http.post(path, json=body)
        if not stream:
            return answer.json()["choices"][0]
        pieces = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line[6:7] == "{"]
        assert all(piece["stop_reason"] is None for piece in pieces[:-1])
        return pieces[-1]

    with served.http() as http:
        free = ask(http)
        assert (free["finish_reason"], free["stop_reason"]) == ("length", None)
        ids = served.service.tokenizer.encode(greedy_text(served, prompt), add_special_tokens=False)
        by_token = ask(http, stop_token_ids=[ids[5]])
        assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", ids[5])
        word = greedy_text(served, prompt)[8:11]
        by_text = ask(http, stop=["never there", word])
        assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", word)
        end = next(iter(served.runner.model_info.end_ids))
        own_end = ask(http, ignore_eos=False, logit_bias={str(end): 100})
        assert (own_end["finish_reason"], own_end["stop_reason"]) == ("stop", None)


def greedy_text(served: Served, prompt: Any) -> str:
    """24 tokens after a prompt."""
    tokenizer = served.service.tokenizer
    text = served.service.templates.render(prompt["messages"]) if "messages" in prompt else prompt["prompt"]
    return greedy(served, [tokenizer.encode(text)], 24)[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_tokens_warm_a_prefix(served: Served, path: str, stream: bool) -> None:
    """The prompt is computed and its blocks are kept; nothing is generated, and a request that follows finds them."""
    text = f"{path} {stream} " + "The prince looked at the count " * 10
    prompt: Any = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    salt = {"cache_salt": f"{path}{stream}"}

    def ask(http: Any, **fields: Any) -> Any:
        body = {**prompt, **salt, "temperature": 0, "logprobs": 1 if "prompt" in prompt else True, **fields}
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        pieces = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
        choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
        text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
        return {"usage": pieces[-1]["usage"], "choices": [{**choices[-1], "text": text}]}

    with served.http() as http:
        before = served.runner.stats()["blocks_cached"], generated_tokens(http)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        warm = ask(http, max_tokens=0, stream=stream, n=2, **options)
        choice = warm["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert (choice.get("text") or choice.get("message", {}).get("content") or "") == ""
        tokens = choice["logprobs"] or {}
        assert [tokens.get("tokens") or [], tokens.get("content") or []] == [[], []]
        usage = warm["usage"]
        assert usage["completion_tokens"] == 0
        assert usage["prompt_tokens"] == usage["total_tokens"] > 64
        assert generated_tokens(http) == before[1], "they are counted nowhere"
        assert served.runner.stats()["blocks_cached"] > before[0]
        hot = ask(http, max_tokens=2, stream=False)
        size = served.runner.executor._loop._blocks.tokens_per_block
        cached = hot["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (usage["prompt_tokens"] - 1) // size * size
        assert hot["usage"]["completion_tokens"] == 2


def generated_tokens(http: Any) -> float:
    found = re.search(r"^ingot_generated_tokens_total (\S+)$", http.get("/metrics").text, flags=re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_without_a_limit(served: Served) -> None:
    client, room = served.client(), served.runner.model_info.limits.max_seq_len
    lengths = []
    for prompt in ([5] * 10, [5] * (room - 3)):
        answer = client.completions.create(model="tiny", prompt=prompt, extra_body={"ignore_eos": True})
        lengths.append(answer.usage and answer.usage.completion_tokens)
    assert lengths == [16, 3], "OpenAI's default, lowered to what fits"


@pytest.mark.slow
def test_sixty_four_at_once(served: Served) -> None:
    prompts = text_prompts(64)
    expected = greedy(served, [served.service.tokenizer.encode(prompt) for prompt in prompts], 16)

    async def all_of_them() -> list[str]:
        async with served.async_client() as client:

            async def one(place: int) -> str:
                options: Any = {"model": "tiny", "prompt": prompts[place], "max_tokens": 16, "temperature": 0}
                if place % 2:
                    return str((await client.completions.create(**options)).choices[0].text)
                pieces = await client.completions.create(**options, stream=True)
                return "".join([piece.choices[0].text async for piece in pieces])

            return await asyncio.gather(*map(one, range(64)))

    assert asyncio.run(all_of_them()) == expected
    assert eventually(served.is_empty)


def test_models_and_errors(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "ingot"
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has tiny"):
        client.completions.create(model="gpt-5", prompt="a")
    with pytest.raises(openai.NotFoundError, match="gives no embeddings"):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError, match="stores nothing"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="'audio' is refused") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, audio={"format": "wav", "voice": "alloy"})
    assert (caught.value.param, caught.value.code) == ("audio", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="max_seq_len") as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded"
    for accepted in ({"user": "me"}, {"metadata": {"a": "b"}}, {"service_tier": "auto"}, {"store": False}):
        extra: Any = {**accepted, "safety_identifier": "x", "prompt_cache_key": "y"}
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, **extra)
