"""/v1/messages as Anthropic's clients send and read it, and /v1/messages/count_tokens."""

import dataclasses
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.answers.deltas import CallArguments, CallBegin, Content, Reasoning
from ingot.runtime.request import FinishReason
from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.body import read_body
from ingot.runtime.server.messages_format import MessagesChunkBuilder
from ingot.runtime.server.messages_protocol import MessagesRequest
from ingot.runtime.server.openai_format import Counts, ResponseHead
from ingot.runtime.text_stream import TextEvent
from tests.runtime.server.served import CONFIG, Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")

SCHEMA = {"type": "object", "properties": {"u": {"enum": ["c", "k"]}}, "required": ["u"], "additionalProperties": False}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
ASKED: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 120,
    "temperature": 0,
    "messages": [{"role": "user", "content": "hi"}],
}
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "c", "signature": "s"},
            {"type": "text", "text": "d"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"u": "c"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "e"}], "is_error": True},
            {"type": "text", "text": "g"},
        ],
    },
]


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    config = dataclasses.replace(CONFIG, chat_template="chatml", model_names=("tiny", "claude-*"))
    with serving_engine(engine, config) as served:
        yield served


def ask(served: Served, **fields: Any) -> Any:
    with served.http() as http:
        return http.post("/v1/messages", json={**ASKED, **fields})


def events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    text = ask(served, stream=True, **fields).text
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.slow
def test_text(served: Served) -> None:
    whole = ask(served).json()
    (block,) = whole["content"]
    assert (whole["type"], whole["role"], block["type"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "text",
        "max_tokens",
    )
    assert whole["usage"]["output_tokens"] == 120
    found = events(served)
    assert [each["type"] for each in found[:3]] == ["message_start", "ping", "content_block_start"]
    assert [each["type"] for each in found[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for each in found if each["type"] == "content_block_delta") == block["text"]
    assert found[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.slow
def test_calls(served: Served) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = ask(served, **fields).json()
    (block,) = whole["content"]
    assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "f", "tool_use")
    assert block["input"]["u"] in ("c", "k")
    found = events(served, **fields)
    pieces = [each["delta"]["partial_json"] for each in found if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == block["input"]


def test_a_stop_sequence_is_told(served: Served) -> None:
    text = ask(served).json()["content"][0]["text"]
    whole = ask(served, stop_sequences=[text[5:12]]).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", text[5:12])


def test_counting_agrees_with_what_is_computed(served: Served) -> None:
    fields = {"messages": HISTORY, "system": "s", "tools": [TOOL]}
    usage = ask(served, **fields, max_tokens=1).json()["usage"]
    body = {name: each for name, each in {**ASKED, **fields}.items() if name not in ("max_tokens", "temperature")}
    with served.http() as http:
        counted = http.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_errors_have_anthropics_form(served: Served) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"mcp_servers": [{"type": "url", "name": "a", "url": "https://example.com"}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    )
    for fields in wrong:
        answer = ask(served, **fields)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert ask(served, max_tokens=0).status_code == 400
    assert ask(served, model="other").json()["error"]["type"] == "not_found_error"
    assert ask(served, thinking={"type": "enabled", "budget_tokens": 2000}).status_code == 400, "it does not reason"
    assert ask(served, thinking={"type": "disabled"}, max_tokens=1).is_success


def test_fields_that_ask_for_nothing_are_taken(served: Served) -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    tool = {**TOOL, "allowed_callers": ["direct"], "defer_loading": False, "eager_input_streaming": True}
    fields: dict[str, Any] = {
        "cache_control": {"type": "ephemeral"},
        "context_management": keep,
        "mcp_servers": [],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
        "speed": "standard",
        "thinking": {"type": "adaptive", "display": "summarized"},
        "tools": [tool],
    }
    assert ask(served, **fields, max_tokens=2).is_success
    assert ask(served, output_config={"effort": "low"}, max_tokens=2).status_code == 400, "it has no levels"


@pytest.mark.parametrize("name", MessagesRequest.refused)
def test_refusals_give_the_reason(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(MessagesRequest, json.dumps({**ASKED, name: {"a": 1}}).encode())
    assert (caught.value.status, caught.value.param) == (400, name)
    assert MessagesRequest.refused[name] in caught.value.message


def test_a_tool_takes_an_object() -> None:
    with pytest.raises(ApiError) as caught:
        read_body(
            MessagesRequest, json.dumps({**ASKED, "tools": [{"name": "f", "input_schema": {"type": "x"}}]}).encode()
        )
    assert (caught.value.status, caught.value.param) == (400, "tools.0.input_schema")


def test_every_field_of_anthropic_has_a_place() -> None:
    module = "anthropic.types{}.message_create_params"
    pytest.importorskip("anthropic", reason="needs anthropic")
    for beta in ("", ".beta"):
        params = importlib.import_module(module.format(beta)).MessageCreateParamsBase
        fields = {name for each in params.__mro__ for name in getattr(each, "__annotations__", ())}
        assert len(fields) > 15
        assert fields - set(MessagesRequest.model_fields) - set(MessagesRequest.refused) == set()


def test_what_others_reasoned_and_system_messages_between(served: Served) -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "d"}]
    messages = [*ASKED["messages"], {"role": "assistant", "content": blocks}, {"role": "system", "content": "s"}]
    given = read_body(MessagesRequest, json.dumps({**ASKED, "messages": messages}).encode())
    found = [each.for_template() for each in given.as_chat((), reasons=False).messages]
    assert found[1:] == [{"role": "assistant", "content": "d"}, {"role": "system", "content": "s"}]


def test_blocks_become_the_messages_of_a_chat() -> None:
    body = {**ASKED, "messages": HISTORY, "system": [{"type": "text", "text": "s"}], "thinking": {"type": "disabled"}}
    given = read_body(MessagesRequest, json.dumps(body).encode())
    found = [each.for_template() for each in given.as_chat({"enable_thinking"}, reasons=True).messages]
    assert [each["role"] for each in found] == ["system", "user", "assistant", "tool", "user"]
    assert (found[1]["content"], found[2]["reasoning_content"], found[3]["content"]) == ("a\nb", "c", "Error: e")
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"u": "c"}}
    assert given.as_chat({"enable_thinking"}, reasons=True).chat_template_kwargs == {"enable_thinking": False}
    assert given.as_chat({"thinking_mode"}, reasons=True).chat_template_kwargs == {"thinking_mode": "disabled"}
    assert given.as_chat((), reasons=True).thinking_token_budget == 0
    assert given.as_chat((), reasons=False).thinking_token_budget is None


def test_thinking_text_and_calls_are_blocks() -> None:
    writer = MessagesChunkBuilder(ResponseHead(answer_id="msg-1", created=1, model="m", fingerprint="f"))
    deltas = (
        Reasoning(text="a"),
        Content(text="b"),
        CallBegin(index=0, call_id="i", name="f"),
        CallArguments(index=0, text='{"u'),
        CallArguments(index=0, text='": 1}'),
        CallBegin(index=1, call_id="j", name="g"),
    )
    event = TextEvent(index=0, deltas=deltas, finish_reason=FinishReason.STOP)
    counts = Counts(prompt=9, cached=4, generated=5)
    writer.add(0, event)
    whole = writer.whole(counts)
    assert [each["type"] for each in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [each["input"] for each in whole["content"][2:]] == [{"u": 1}, {}]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (5, 4)
    hidden = MessagesChunkBuilder(
        ResponseHead(answer_id="a", created=1, model="m", fingerprint="f"), with_reasoning=False
    )
    hidden.add(0, event)
    assert [each["type"] for each in hidden.whole(counts)["content"]] == ["text", "tool_use", "tool_use"]
    found = [*writer.openings(counts), *writer.pieces(0), *writer.endings(counts)]
    starts = [(each["index"], each["content_block"]["type"]) for each in found if each["type"] == "content_block_start"]
    assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [each["index"] for each in found if each["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_the_official_client_reads_it(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0)
    asked = {**ASKED, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}
    extra = {"temperature": asked.pop("temperature")}
    with client.messages.stream(**asked, extra_body=extra) as stream:
        (block,) = stream.get_final_message().content
    assert block.input["u"] in ("c", "k")
    assert client.messages.count_tokens(model="tiny", messages=ASKED["messages"]).input_tokens > 3
