"""Tools over HTTP, with the official client: what is promised is kept, and pieces add up to the whole."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.served import CONFIG, Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")


def tool(name: str, *units: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"u": {"enum": list(units)}},
        "required": ["u"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", "c", "k"), tool("g", "m")]
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 120, "seed": 3}
PLACE = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    with serving_engine(engine, dataclasses.replace(CONFIG, chat_template="chatml")) as served:
        yield served


def refusal(served: Served, **fields: Any) -> httpx.Response:
    with served.http() as http:
        return http.post("/v1/chat/completions", json={**ASKED, **fields})


@pytest.mark.daily(1)
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (PLACE, "stop")])
def test_a_call_that_must_come_comes(served: Served, choice: Any, reason: str) -> None:
    with served.client() as client:
        whole = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        (found,) = whole.choices
        assert (found.finish_reason, found.message.content) == (reason, None)
        assert found.message.tool_calls is not None
        (call,) = found.message.tool_calls
        assert call.type == "function"
        assert call.function.name in (("f", "g") if choice == "required" else ("g",))
        assert json.loads(call.function.arguments)["u"] in (("c", "k") if call.function.name == "f" else ("m",))
        assert len(call.id) == 9

        chunks = list(
            client.chat.completions.create(
                **ASKED, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=True
            )
        )
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert all(each.index == 0 for each in deltas)
    first, *others = deltas
    assert first.function is not None
    assert (first.type, first.function.name, first.function.arguments) == ("function", call.function.name, "")
    assert all((each.id, each.type) == (None, None) for each in others)
    pieces = [each.function.arguments for each in others if each.function is not None]
    assert "".join(piece or "" for piece in pieces) == call.function.arguments
    assert chunks[0].choices[0].delta.role == "assistant"
    last = chunks[-1].choices[0]
    assert (last.finish_reason, last.delta.tool_calls, last.delta.content) == (reason, None, None)


def test_the_stream_helper_reads_it(served: Served) -> None:
    with (
        served.client() as client,
        client.chat.completions.stream(**ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False) as got,
    ):
        answer = got.get_final_completion()
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert {call.function.name for call in calls} <= {"f", "g"}


def test_free_answers_are_what_they_are_without_a_promise(served: Served) -> None:
    with served.client() as client:
        free = client.chat.completions.create(**ASKED, tools=TOOLS).choices[0].message
        none = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none").choices[0].message
        plain = client.chat.completions.create(**ASKED).choices[0].message
    assert (free.tool_calls, none.tool_calls) == (None, None)
    assert none.content == plain.content, "no tool that is told of, none that is called"
    assert free.content


def test_calls_of_earlier_answers_and_results_are_history(served: Served) -> None:
    call = {"id": "a" * 9, "type": "function", "function": {"name": "f", "arguments": '{"u": "c"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a" * 9, "content": "3"},
    ]
    with served.http() as http:
        asked = {"messages": messages, "tools": TOOLS[:1]}
        ids = http.post("/tokenize", json=asked).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert http.post("/v1/chat/completions", json={**ASKED, "messages": messages, "max_tokens": 2}).is_success
    assert '<tool_call>\n{"name": "f", "arguments": {"u": "c"}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n" in text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "must be a function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice",
            "does not have",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"functions": [{"name": "f"}]}, "functions", "say tools"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "form",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    answer = refusal(served, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_formats_are_told(served: Served) -> None:
    with served.http() as http:
        version = http.get("/version").json()
    assert (version["tool_parser"], version["reasoning_parser"]) == ("hermes", None)
