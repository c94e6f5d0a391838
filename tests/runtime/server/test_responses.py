"""/v1/responses with the official client: events and items add up, and nothing is stored."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.body import read_body
from ingot.runtime.server.responses_protocol import ResponsesRequest
from tests.runtime.server.served import CONFIG, Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")

PARAMETERS = {"type": "object", "properties": {"u": {"enum": ["c", "k"]}}, "required": ["u"]}
TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {**PARAMETERS, "additionalProperties": False},
    "strict": True,
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 120, "temperature": 0}


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    with serving_engine(engine, dataclasses.replace(CONFIG, chat_template="chatml")) as served:
        yield served


@pytest.mark.daily(1)
@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}])
def test_events_add_up_to_the_response(served: Served, fields: dict[str, Any]) -> None:
    with served.client(_strict_response_validation=True) as client:
        whole = client.responses.create(**ASKED, **fields)
        with client.responses.stream(**ASKED, **fields) as stream:
            events: list[Any] = list(stream)
    last = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (item,), (same,) = whole.output, last.output
    if fields:
        assert item.type == same.type == "function_call"
        assert (item.name, item.status) == ("f", "completed")
        assert json.loads(item.arguments)["u"] in ("c", "k")
        assert item.arguments == same.arguments
        assert item.call_id
    else:
        assert whole.output_text
        assert whole.output_text == last.output_text
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == last.output_text
    assert whole.status == last.status == ("completed" if fields else "incomplete")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    types = [event.type for event in events]
    assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert types[-2:] == ["response.output_item.done", f"response.{whole.status}"]


def test_forms(served: Served) -> None:
    form: Any = {
        "format": {"type": "json_schema", "name": "n", "schema": {"type": "integer", "maximum": 9, "minimum": 0}}
    }
    with served.client() as client:
        answer = client.responses.create(**ASKED, text=form)
    assert 0 <= json.loads(answer.output_text) <= 9


def asked(items: Any, **fields: Any) -> ResponsesRequest:
    return read_body(ResponsesRequest, json.dumps({"input": items, **fields}).encode())


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "d"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "e", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "h"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "i"}]},
        {"role": "assistant", "content": "j"},
    ]
    found = [each.for_template() for each in asked(items, instructions="a").as_chat().messages]
    assert [each["role"] for each in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[0]["content"] == "a\n\nb"
    assert (found[2]["reasoning_content"], found[2]["content"]) == ("d", "e")
    assert [each["function"]["name"] for each in found[2]["tool_calls"]] == ["f", "g"]
    assert (found[4]["reasoning_content"], found[4]["content"]) == ("i", "j")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, {"type": "custom", "name": "p", "format": {"type": "text"}}]}, "tools.1.type"),
        ({"tools": [{"type": "two words"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 1}]}, "input.0.output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input.0.summary"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input.0.content.0.text"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools.0.parameters"),
    ],
)
def test_what_needs_a_store_or_a_tool_of_the_server_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(
            **{"items": "hi", **{("items" if name == "input" else name): each for name, each in fields.items()}}
        ).as_chat()
    assert caught.value.param == param
