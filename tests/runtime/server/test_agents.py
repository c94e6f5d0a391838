"""Requests as coding agents send them: Codex asks for responses, Claude Code for messages. Both always stream."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.served import CONFIG, Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: read-only"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "runs it", "strict": False, "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "files", "tools": []},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 24,
    "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.py"}]},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {"name": "Bash", "description": "runs it", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "disabled"},
    "temperature": 1,
    "stream": True,
}


@pytest.fixture(scope="module")
def served(engine: Path) -> Iterator[Served]:
    names = ("tiny", "claude-*")
    config = dataclasses.replace(CONFIG, chat_template="chatml", model_names=names, skip_unsupported_tools=True)
    with serving_engine(engine, config) as served:
        yield served


def events(served: Served, route: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """(the events of a stream, types of the tools left out)"""
    with served.http() as http:
        answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in filter(None, answer.text.split("\n\n"))]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [each["type"] for each in found]
    return found, answer.headers.get("x-ingot-skipped-tools")


@pytest.mark.slow
def test_codex(served: Served) -> None:
    found, skipped = events(served, "/v1/responses", {**CODEX, "max_output_tokens": 24})
    assert skipped == "web_search, custom, namespace"
    types = [each["type"] for each in found]
    assert types[0] == "response.created"
    assert {"response.output_item.added", "response.output_text.delta", "response.output_item.done"} <= {*types}
    last = found[-1]["response"]
    assert types[-1] == f"response.{last['status']}"
    assert [each["name"] for each in last["tools"]] == ["shell"]
    text = "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
    assert last["output"][-1]["content"][0]["text"] == text


def test_codex_calls_what_is_left(served: Served) -> None:
    asked = {**CODEX, "instructions": "a", "input": "go", "tool_choice": "required", "temperature": 0}
    asked["max_output_tokens"] = 210
    asked["tools"] = [{**CODEX["tools"][0], "parameters": {"type": "object", "properties": {"n": {"enum": [1]}}}}]
    asked["tools"][0]["parameters"] |= {"required": ["n"], "additionalProperties": False}
    found, skipped = events(served, "/v1/responses", {**asked, "tools": [*asked["tools"], {"type": "web_search"}]})
    assert skipped == "web_search"
    (call,) = (each["item"] for each in found if each["type"] == "response.output_item.done")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "shell", {"n": 1})
    assert call["call_id"]


def test_claude_code(served: Served) -> None:
    found, skipped = events(served, "/v1/messages", CLAUDE_CODE)
    assert skipped == "web_search_20250305"
    types = [each["type"] for each in found]
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
    counted = {name: each for name, each in CLAUDE_CODE.items() if name in ("model", "system", "messages", "tools")}
    with served.http() as http:
        count = http.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"]
    usage = found[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count


def test_no_header_where_nothing_is_left_out(served: Served) -> None:
    _, skipped = events(served, "/v1/responses", {**CODEX, "tools": CODEX["tools"][:1], "max_output_tokens": 2})
    assert skipped is None


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("route", "body"), [("/v1/responses", CODEX), ("/v1/messages", CLAUDE_CODE), ("/v1/messages/count_tokens", {})]
)
def test_a_server_that_skips_nothing_refuses(engine: Path, route: str, body: dict[str, Any]) -> None:
    names = ("tiny", "claude-*")
    config = dataclasses.replace(CONFIG, chat_template="chatml", model_names=names)
    asked = body or {name: CLAUDE_CODE[name] for name in ("model", "messages", "tools")}
    with serving_engine(engine, config) as served, served.http() as http:
        answer = http.post(route, json=asked)
    assert answer.status_code == 400
    assert "tools.1.type" in answer.text
    assert "--skip_unsupported_tools" in answer.text
