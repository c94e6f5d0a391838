"""A stream goes on at another server with the tokens that it would have had at the first one."""

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.server.served import Served, ServeProcess

SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
PATH = "/v1/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": "The prince", "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **more}


def choices(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def answer(served: Served, **fields: Any) -> dict[str, Any]:
    with served.http() as http:
        found = http.post(PATH, json=fields)
    assert found.status_code == 200, found.text
    choice: dict[str, Any] = found.json()["choices"][0]
    return choice


def read_until_killed(server: ServeProcess, asked: dict[str, Any]) -> tuple[list[int], str]:
    """Tokens and text that were read when the server was killed; what a fast server had already sent is lost."""
    tokens: list[int] = []
    text = ""
    sent: dict[str, Any] = {"json": asked, "timeout": 60}
    with contextlib.suppress(httpx.HTTPError), server, httpx.stream("POST", f"{server.url}{PATH}", **sent) as stream:
        for line in stream.iter_lines():
            for choice in choices(line):
                tokens += choice.get("token_ids") or ()
                text += choice["text"]
            if len(tokens) >= 5:
                server.process.kill()
                break
    return tokens, text


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("how", [{"temperature": 0}, SEEDED], ids=["greedy", "seeded"])
def test_a_server_is_killed_in_the_middle_of_a_stream(how: dict[str, Any], engine: Path, served: Served) -> None:
    """The other server is the one that all tests share: the same engine, in another process."""
    asked = body(**how, stream=True, max_tokens=400)
    tokens, text = read_until_killed(ServeProcess(engine), asked)
    assert 5 <= len(tokens) < 380, "killed in the middle"
    asked["max_tokens"] = len(tokens) + 20  # for speed: no token depends on it
    expected = answer(served, **{**asked, "stream": False})
    assert tokens == expected["token_ids"][: len(tokens)]
    with served.http() as http:
        rest = choices(http.post(PATH, json={**asked, "resume_token_ids": tokens}).text)
    assert tokens + [token for choice in rest for token in choice.get("token_ids") or ()] == expected["token_ids"]
    assert text + "".join(choice["text"] for choice in rest) == expected["text"]


@pytest.mark.daily(1)
@pytest.mark.parametrize("at", [1, 17, 59])
def test_every_rule_goes_on(at: int, served: Served, engine: Path) -> None:
    fields = body(**SEEDED, logprobs=2, min_tokens=30, structured_outputs={"regex": "[a-z ]{20,80}"})
    whole = answer(served, **fields)
    at = min(at, len(whole["token_ids"]) - 1)
    rest = answer(served, **fields, resume_token_ids=whole["token_ids"][:at])
    assert rest["token_ids"] == whole["token_ids"][at:]
    assert rest["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][at:]
    first = Tokenizer.from_dir(engine).decode(whole["token_ids"][:at])
    assert first + rest["text"] == whole["text"]
    assert rest["finish_reason"] == whole["finish_reason"]


@pytest.mark.slow
def test_a_stop_text_across_the_seam(served: Served) -> None:
    whole = answer(served, **body(temperature=0))
    stop = whole["text"][20:26]
    assert whole["text"].index(stop) == 20
    fields = body(temperature=0, stop=[stop])
    cut = answer(served, **fields)
    assert cut["finish_reason"] == "stop"
    for at in range(1, len(cut["token_ids"])):
        rest = answer(served, **fields, resume_token_ids=cut["token_ids"][:at])
        assert rest["finish_reason"] == "stop"
        assert cut["text"].endswith(rest["text"])
        assert rest["token_ids"] == cut["token_ids"][at:]
    with served.http() as http:
        ended = http.post(PATH, json={**fields, "resume_token_ids": cut["token_ids"]})
    assert (ended.status_code, "has ended already" in ended.text) == (400, True)


def test_chats_go_on(served: Served) -> None:
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "return_token_ids": True, **SEEDED}
    with served.http() as http:
        whole = http.post("/v1/chat/completions", json=fields).json()["choices"][0]
        at = len(whole["token_ids"]) // 2
        ids = whole["token_ids"][:at]
        rest = http.post("/v1/chat/completions", json={**fields, "resume_token_ids": ids}).json()["choices"][0]
    assert rest["token_ids"] == whole["token_ids"][at:]
    assert whole["message"]["content"].endswith(rest["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.5}, "only with the seed"),
        ({"temperature": 0, "n": 2}, "one sequence at a time"),
        ({"temperature": 0, "max_tokens": 2}, "as many tokens as it may have"),
        ({"temperature": 0, "prompt": ["a", "b"]}, "more than one prompt"),
        ({"temperature": 0, "echo": True}, "echo"),
        ({"temperature": 0, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"temperature": 0, "stop_token_ids": [3]}, "has ended already"),
        ({"temperature": 0, "resume_token_ids": [1 << 30]}, "resume_token_ids"),
    ],
)
def test_refusals(fields: dict[str, Any], words: str, served: Served) -> None:
    with served.http() as http:
        found = http.post(PATH, json={**body(resume_token_ids=[3, 4]), **fields})
    assert found.status_code == 400, found.text
    assert words in found.json()["error"]["message"]
