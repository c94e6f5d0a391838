"""Wire formats on a running server: calls that are promised, in one piece and in a stream, behind reasoning, and
back in the history. The model is the shipped one, whose last tokens are the marks of all formats."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.chat_template import ChatTemplates
from tests.runtime.answers.samples import RESPONSE_TOKENS, TOKENS
from tests.runtime.answers.templates import FAMILIES
from tests.runtime.server.marked import mark_tokenizer
from tests.runtime.server.served import Served, serving_engine

pytest.importorskip("llguidance", reason="needs llguidance")

SKIES = ("clear", "grey")
UNUSED = [
    "<tool_sep>",
    "<tool_calls>",
    "</tool_calls>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
    "<|function_call|>",
    "<|role_sep|>",
    "<|message_sep|>",
]
"""Marks of formats that no test here has: of each, the model loses a token of its own."""
MARKS = [each for each in TOKENS if each not in UNUSED]
MARKS += [*RESPONSE_TOKENS, "<|START_THINKING|>", "<|END_THINKING|>", "[THINK]", "[/THINK]", "<|channel>"]
MARKS += ["<channel|>", "<mm:think>", "</mm:think>", "<seed:think>", "</seed:think>"]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "seed": 3, "messages": [{"role": "user", "content": "hi"}]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"sky": {"enum": [*SKIES]}, "deg": {"type": "integer", "minimum": 0, "maximum": 40}},
        "required": ["sky", "deg"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


FORMATS = ("kimi_k3", "command", "harmony", "qwen3_coder", "mistral_v11", "gemma4", "pythonic", "minimax_m3")
"""One of each coding; `tests/runtime/answers` has all formats, without a server."""
ENDS_TEXT = {"kimi_k3": "<|close|>", "command": "<|END_RESPONSE|>", "harmony": "<|end|>"}
"""Formats in which text may stand before a call that must come: what ends it. This model would go on and on."""
TOOLS = [tool("weather"), tool("now", strict=True)]
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine."""
    folder = tmp_path_factory.mktemp("marked")
    shutil.copytree(SHIPPED, folder / "model")
    mark_tokenizer(folder / "model" / "tokenizer.json", MARKS)
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    build(BuildConfig(), folder / "checkpoint", folder / "engine")
    return folder / "engine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Who asks a server of one format."""

    name: str
    served: Served

    def ask(self, **fields: Any) -> dict[str, Any]:
        """The message, and its finish_reason. A stream of the same request says the same."""
        asked = {**ASKED, **fields}
        with self.served.http() as http:
            answer = http.post("/v1/chat/completions", json=asked).json()
            assert "choices" in answer, answer
            ((message, reason),) = ((each["message"], each["finish_reason"]) for each in answer["choices"])
            lines = http.post("/v1/chat/completions", json={**asked, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streamed: dict[str, Any] = {"content": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        for chunk in chunks:
            delta = chunk["choices"][0]["delta"]
            for field in streamed:
                streamed[field] += delta.get(field) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({**call, "function": {**call["function"]}})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        assert streamed == {field: message.get(field) or "" for field in streamed}
        assert [each["function"] for each in calls] == [each["function"] for each in message.get("tool_calls", ())]
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
        return {**message, "finish_reason": reason}

    @property
    def bias(self) -> dict[str, float] | None:
        """See ENDS_TEXT."""
        marks = self.served.service.tokenizer.control_tokens
        return {str(marks[ENDS_TEXT[self.name]]): 100} if self.name in ENDS_TEXT else None

    def call(self, **fields: Any) -> dict[str, Any]:
        """The message of an answer that is one call; its arguments are what the tool takes."""
        message = self.ask(tools=TOOLS, parallel_tool_calls=False, logit_bias=self.bias, **fields)
        (call,) = message["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert found.keys() == {"sky", "deg"}
        assert found["sky"] in SKIES
        assert 0 <= found["deg"] <= 40
        return message


@pytest.fixture(scope="module")
def server(marked: Path) -> Iterator[Served]:
    with serving_engine(marked) as served:
        yield served


@pytest.fixture(params=FORMATS)
def asked(request: pytest.FixtureRequest, server: Served) -> Iterator[Asked]:
    """The server, with templates and formats as if it had started with them."""
    family, service = FAMILIES[request.param], server.service
    thinks = "" if family.thinks is None else json.dumps(family.thinks[0], ensure_ascii=False)
    begins = f"{{% if add_generation_prompt and thinking %}}{{{{ {thinks} }}}}{{% endif %}}" if thinks else ""
    text = dataclasses.replace(family, tools="{{ tool.function.name }}\n").template + begins
    service.templates = ChatTemplates({"default": text}, {}, source="a test")
    service.formats = AnswerFormats.find([text], service.tokenizer)
    yield Asked(name=request.param, served=server)
    assert server.is_empty()


@pytest.mark.daily(1)
def test_promises_are_kept(asked: Asked) -> None:
    assert asked.served.service.formats.names[0] == asked.name
    first = asked.call(tool_choice="required")
    assert first["finish_reason"] == "tool_calls"
    named = asked.call(tool_choice=NAMED)
    assert (named["tool_calls"][0]["function"]["name"], named["finish_reason"]) == ("now", "stop")
    stopped = asked.ask(tools=TOOLS, tool_choice=NAMED, stop=["deg"], logit_bias=asked.bias)
    assert stopped["finish_reason"] == "stop"
    for call in stopped.get("tool_calls", ()):
        assert named["tool_calls"][0]["function"]["arguments"].startswith(call["function"]["arguments"])
        assert not call["function"]["arguments"].endswith("}"), "a call that a stop text cuts is not closed"
    free = asked.ask(tools=TOOLS, max_tokens=20)
    assert free["finish_reason"] in ("stop", "length", "tool_calls")
    family = FAMILIES[asked.name]
    if family.thinks is not None and asked.name != "harmony":
        thinks = {"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 6}
        thought = asked.call(tool_choice="required", **thinks)
        assert thought["reasoning"]
        assert thought["reasoning"] == thought["reasoning_content"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "It is grey."}
    history = [*ASKED["messages"], {**first, "finish_reason": None}, result]
    del history[1]["finish_reason"]
    with asked.served.http() as http:
        ids = http.post("/tokenize", json={"messages": history, "tools": TOOLS}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert first["tool_calls"][0]["function"]["name"] in text.split("hi", 1)[1]
    assert "It is grey." in text
    asked.ask(messages=history, tools=TOOLS, max_tokens=2)
