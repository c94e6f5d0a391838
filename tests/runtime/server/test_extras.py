"""What vLLM's users find beside OpenAI's fields: going on from a message, token ids, probabilities of prompts."""

import json
from typing import Any

import pytest

from tests.runtime.server.served import Served

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}]
GO_ON: dict[str, Any] = {"messages": MESSAGES, "add_generation_prompt": False, "continue_final_message": True}
SHORT: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


def post(served: Served, path: str, **body: Any) -> Any:
    with served.http() as http:
        return http.post(path, json=body)


@pytest.mark.slow
def test_an_answer_goes_on_from_a_message(served: Served) -> None:
    ids = post(served, "/tokenize", **GO_ON).json()["tokens"]
    text = post(served, "/detokenize", tokens=ids).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    answer = post(served, "/v1/chat/completions", **GO_ON, **SHORT).json()["choices"][0]["message"]["content"]
    assert answer == post(served, "/v1/completions", prompt=ids, **SHORT).json()["choices"][0]["text"]
    echoed = post(served, "/v1/chat/completions", **GO_ON, **SHORT, echo=True).json()["choices"][0]["message"]
    assert echoed["content"] == f"Once upon{answer}"
    lines = post(served, "/v1/chat/completions", **GO_ON, **SHORT, echo=True, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == echoed["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_and_probabilities_of_the_prompt(served: Served, path: str) -> None:
    chat = "chat" in path
    asked = {"messages": MESSAGES[:1]} if chat else {"prompt": "Once upon a time"}
    fields = {**asked, **SHORT, "return_token_ids": True}
    whole = post(served, path, **fields, prompt_logprobs=2).json()
    (choice,) = whole["choices"]
    told = whole if chat else choice
    prompt = told["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    first, *others = told["prompt_logprobs"]
    assert first is None
    for token, row in zip(prompt[1:], others, strict=True):
        assert str(token) in row
        assert 2 <= len(row) <= 3
    lines = post(served, path, **fields, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert (chunks[0] if chat else chunks[0]["choices"][0])["prompt_token_ids"] == prompt
    pieces = [each for chunk in chunks for each in chunk["choices"][0].get("token_ids", ())]
    assert pieces == choice["token_ids"]


def test_a_prompt_is_cut_from_the_left(served: Served) -> None:
    fields = {"prompt": "one two three four", "echo": True, **SHORT, "return_token_ids": True}
    whole = post(served, "/v1/completions", **fields).json()["choices"][0]["prompt_token_ids"]
    cut = post(served, "/v1/completions", **fields, truncate_prompt_tokens=3).json()["choices"][0]
    assert cut["prompt_token_ids"] == whole[-3:]
    assert cut["text"].startswith(served.service.tokenizer.decode(whole[-3:]))
    limit = served.runner.model_info.limits.max_input_len
    long = {"prompt": "one " * 3 * limit, "max_tokens": 1, "truncate_prompt_tokens": -1}
    assert post(served, "/v1/completions", **long).json()["usage"]["prompt_tokens"] == limit


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat/completions", {"messages": MESSAGES, "continue_final_message": True}, "opens no answer"),
        ("chat/completions", {**GO_ON, "messages": MESSAGES[:1]}, "a last message of the assistant"),
        ("chat/completions", {"messages": MESSAGES, "prompt_logprobs": 1, "stream": True}, "needs stream: false"),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "at least 1"),
        ("completions", {"prompt": "a", "suffix": "b"}, "no tokens for filling in the middle"),
        ("completions", {"prompt": [1], "suffix": "b"}, "a prompt that is text"),
        ("completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo cannot be combined with suffix"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "echo": True},
            "echo needs continue_final",
        ),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, "must be equal"),
    ],
)
def test_what_contradicts_itself_is_refused(served: Served, path: str, fields: dict[str, Any], words: str) -> None:
    answer = post(served, f"/v1/{path}", **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
