"""OpenAI's requests for responses, and the chats that they ask for. Nothing is stored: the input is the whole history.

instructions, developer ──▶ the system message; reasoning, message and calls of one turn ──▶ one assistant message
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.body import validated
from ingot.runtime.server.other_tools import OtherTool, functions_of, tag_of
from ingot.runtime.server.protocol import (
    MAX_MESSAGES,
    MAX_NAMED,
    MAX_TOOLS,
    Body,
    ChatRequest,
    Effort,
    Fields,
    ToolSchema,
)

_STATUS = Literal["in_progress", "completed", "incomplete"]
# field of the chat that a request asks for → the request's own
NAMES_OF_RESPONSES = {"reasoning_effort": "reasoning.effort", "response_format": "text.format"}
_NOT_STORED = "nothing is stored: send the whole conversation as input"


class Part(Fields):
    """A piece of text. Without effect: annotations and logprobs of earlier answers, prompt_cache_breakpoint."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


Parts = Annotated[list[Part], Field(max_length=MAX_NAMED, fail_fast=True)]


class Item(Fields):
    """id, status: without effect."""

    id: str | None = None
    status: _STATUS | None = None


class Caller(Fields):
    """Who calls tools: the model itself."""

    type: Literal["direct"]


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    phase: str | None = None


class CallItem(Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    caller: Caller | None = None
    namespace: None = None


class OutputItem(Item):
    """What a tool gave. name: without effect, the call has it."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    name: str | None = None
    caller: Caller | None = None
    namespace: None = None


class ReasoningItem(Item):
    """What the model thought; encrypted_content is nobody's here."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: str | None = None


AnyItem = MessageItem | CallItem | OutputItem | ReasoningItem
_ITEMS = {"function_call": CallItem, "function_call_output": OutputItem, "reasoning": ReasoningItem}


def _item_of(value: object) -> str:
    """Which model reads an item: without a type, or with one that is not known, it counts as a message."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return (_ITEMS.get(kind, MessageItem) if isinstance(kind, str) else MessageItem).__name__


_Item = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[CallItem, Tag("CallItem")]
    | Annotated[OutputItem, Tag("OutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    Discriminator(_item_of),
]


class FunctionTool(Fields):
    """A tool of the client, in OpenAI's flat form. The model calls it itself, and knows it from the start."""

    type: Literal["function"]
    name: str
    parameters: ToolSchema | None = None
    strict: bool | None = None
    description: str | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[OtherTool, Tag("OtherTool")],
    Discriminator(lambda tool: tag_of(tool, ("function",), "FunctionTool")),
]


class ReasoningConfig(Fields):
    """effort: see reasoning_effort of chats. summary: without effect, the reasoning itself is in the answer. context,
    mode: their defaults alone."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(Fields):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Fields):
    """format: see response_format of chats. verbosity: the default alone."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StreamConfig(Fields):
    """include_obfuscation: without effect, none is padded."""

    include_obfuscation: bool = False


class ResponsesRequest(Body):
    """POST /v1/responses."""

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _NOT_STORED,
        "conversation": _NOT_STORED,
        "prompt": "no prompts are stored: send instructions and input",
        "context_management": "the server compacts no conversation",
        "max_tool_calls": "it counts calls of tools that a server runs, and this one runs none",
        "top_logprobs": "responses have no log probabilities; chats have",
        "access_programs": "there are no such programs",
        "image": "the engine reads and writes text only",
    }
    input: str | Annotated[list[_Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    stream: bool = False
    # without effect
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream_options: StreamConfig | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def as_chat(self, *, skip_tools: bool = False) -> ChatRequest:
        """The chat. skip_tools: leave out tools that are not functions. Raises ApiError."""
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": None
            if self.tools is None
            else [_nested(each) for each in functions_of(self.tools, skip=skip_tools)],
            "tool_choice": _nested_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "stream": self.stream,
        }
        form = None if self.text is None else self.text.format
        if form is not None:
            chat["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                chat["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
        return validated(ChatRequest, chat)

    def echoed(self, temperature: float, top_p: float) -> dict[str, Any]:
        """What a response repeats of its request, with the values that were used."""
        form = None if self.text is None else self.text.format
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            "store": False,
            "temperature": temperature,
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)
            },
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [
                {"strict": False, **each.model_dump(exclude_unset=True)}
                for each in functions_of(self.tools or (), skip=True)
            ],
            "top_p": top_p,
            "truncation": "disabled",
            "user": self.user,
            "metadata": self.metadata or {},
        }

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        items: list[AnyItem] = self.input if isinstance(self.input, list) else []
        if isinstance(self.input, str):
            found.append({"role": "user", "content": self.input})
        for item in items:
            _add(found, item)
        if not any(each["role"] != "system" for each in found):
            raise ApiError(400, "input: there is no message to answer", param="input", code="invalid_value")
        return found


def _text(content: str | list[Part] | None) -> str:
    return content if isinstance(content, str) else "\n".join(each.text for each in content or ())


def _add(messages: list[dict[str, Any]], item: AnyItem) -> None:
    """One more item. Those of one turn of the assistant become one message."""
    last = messages[-1] if messages else {}
    if isinstance(item, OutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        return
    if isinstance(item, MessageItem) and item.role != "assistant":
        role, text = ("user" if item.role == "user" else "system"), _text(item.content)
        if role == "system" and all(each["role"] == "system" for each in messages) and messages:
            last["content"] += f"\n\n{text}"
        else:
            messages.append({"role": role, "content": text})
        return
    if last.get("role") != "assistant" or (isinstance(item, ReasoningItem) and len(last) > 1):
        last = {"role": "assistant"}
        messages.append(last)
    if isinstance(item, ReasoningItem):
        last["reasoning_content"] = _text(item.content) or _text(item.summary) or None
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    else:
        last["content"] = "\n".join(filter(None, [last.get("content"), _text(item.content)]))


def _nested(tool: FunctionTool) -> dict[str, Any]:
    values = tool.model_dump(include={"name", "parameters", "strict", "description"}, exclude_none=True)
    return {"type": "function", "function": values}


def _nested_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """{"type": "function", "name": ...} → as chats have it; lists of tools are read in both forms."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
