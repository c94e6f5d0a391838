"""Anthropic's requests for messages, and the chats that they ask for.

system, user and assistant messages in blocks ──▶ messages of a chat; results of tools are messages of their own
"""

from collections.abc import Container, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.body import validated
from ingot.runtime.server.other_tools import OtherTool, functions_of, tag_of
from ingot.runtime.server.protocol import (
    MAX_MESSAGES,
    MAX_NAMED,
    MAX_STOPS,
    MAX_TOOLS,
    Body,
    ChatRequest,
    Fields,
    Text,
    ToolSchema,
)
from ingot.runtime.thinking_switch import find_switch

# field of the chat that a request asks for → the request's own
NAMES_OF_MESSAGES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking",
}
_LEAST_BUDGET = 1024  # Anthropic's
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_DEFAULT_EFFORT = "high"  # Anthropic's: the same as saying nothing


class Block(Fields):
    """cache_control, citations: without effect; equal heads of prompts share blocks, and nothing is cited."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ThinkingBlock(Fields):
    """Reasoning of an earlier answer. Nothing is signed, so the signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Fields):
    """Reasoning of an earlier answer that only Anthropic's servers can read: no part of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class Caller(Fields):
    """Who calls tools: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(Block):
    """What a tool gave. is_error: the text begins with "Error: "."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_NAMED, fail_fast=True)] = ""
    is_error: bool = False
    toolset_name: None = None


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_NAMED, fail_fast=True)]


class Message(Fields):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(max_length=MAX_NAMED, fail_fast=True)]


class ToolDefinition(Block):
    """A tool of the client; tools that Anthropic's servers run do not exist here. The model calls it itself, and knows
    it from the start. eager_input_streaming: without effect, arguments always stream."""

    name: str
    input_schema: ToolSchema
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag("ToolDefinition")] | Annotated[OtherTool, Tag("OtherTool")],
    Discriminator(lambda tool: tag_of(tool, ("custom",), "ToolDefinition")),
]


class ToolChoice(Fields):
    """Which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """enabled: up to budget_tokens; disabled: not at all; adaptive: as the model likes. display: omitted leaves it out
    of the answer; summarized changes nothing, the reasoning itself is in the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=_LEAST_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class KeepAll(Fields):
    """All turns of thinking."""

    type: Literal["all"]


class KeepThinking(Fields):
    """An edit of the conversation that leaves it as it is: other edits are not done here."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeepAll


class ContextManagement(Fields):
    """What is to be left out of the conversation: nothing."""

    edits: Annotated[list[KeepThinking], Field(max_length=MAX_NAMED, fail_fast=True)] | None = None


class OutputFormat(Fields):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """effort: see reasoning_effort of chats."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    refused: ClassVar[Mapping[str, str]] = {
        "mcp_servers": "this server calls no other ones",
        "container": "this server runs no code",
        "compaction": "the server compacts no conversation",
        "thread": "nothing is stored: send all messages",
        "fallbacks": "there is one model",
        "fallback_credit_token": "there is one model",
        "speed": "there is one speed",
        "inference_geo": "the server does not know where it stands",
        "diagnostics": "nothing is stored to compare with",
        "billing_policy": "nothing is billed",
        "user_profile_id": "there are no profiles",
        "workspace_id": "there are no workspaces",
        "betas": "send the header anthropic-beta; it has no effect",
    }
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None  # without effect, as in blocks

    def as_chat(self, variables: Container[str], *, reasons: bool, skip_tools: bool = False) -> ChatRequest:
        """The chat. variables: of the chat template; reasons: the model is known to reason; skip_tools: leave out tools
        that are not functions of the client. Raises ApiError."""
        return validated(ChatRequest, self._chat(variables, reasons=reasons, skip_tools=skip_tools))

    def _chat(self, variables: Container[str], *, reasons: bool, skip_tools: bool) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [] if self.system is None else [_message("system", _text(self.system))]
        for each in self.messages:
            messages += _messages(each)
        chat: dict[str, Any] = {
            "messages": messages,
            **self._tools(skip_tools),
            **self._thinking(variables, reasons=reasons),
        }
        form = self.output_config and self.output_config.format
        if form:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        effort = self.output_config and self.output_config.effort
        if effort and (effort != _DEFAULT_EFFORT or "reasoning_effort" in variables):
            chat["reasoning_effort"] = _EFFORTS[effort]
        return chat

    def _tools(self, skip: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.tools:
            found["tools"] = [_function(each) for each in functions_of(self.tools, skip=skip)]
        choice = self.tool_choice
        if choice is None:
            return found
        if choice.type == "tool" and choice.name is None:
            raise ApiError(400, "tool_choice: name is missing", param="tool_choice.name", code="invalid_value")
        named = {"type": "function", "function": {"name": choice.name}}
        names: dict[str, Any] = {"any": "required", "tool": named}
        found["tool_choice"] = names.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            found["parallel_tool_calls"] = False
        return found

    def _thinking(self, variables: Container[str], *, reasons: bool) -> dict[str, Any]:
        """The switch of the template, and the budget; without a switch, thinking that is off has a budget of 0."""
        thinking = self.thinking
        shown = {"include_reasoning": False} if thinking is not None and thinking.display == "omitted" else {}
        if thinking is None or thinking.type == "adaptive":
            return shown
        switch = find_switch(variables)
        on = thinking.type == "enabled"
        if on and thinking.budget_tokens is None:
            raise ApiError(400, "thinking: budget_tokens is missing", param="thinking.budget_tokens")
        found: dict[str, Any] = dict(shown)
        if switch is not None:
            found["chat_template_kwargs"] = {switch.name: switch.on if on else switch.off}
        if on or (switch is None and reasons):
            found["thinking_token_budget"] = thinking.budget_tokens if on else 0
        return found


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # without effect
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def _chat(self, variables: Container[str], *, reasons: bool, skip_tools: bool) -> dict[str, Any]:
        same = {
            name: getattr(self, name) for name in ("model", "max_tokens", "temperature", "top_k", "top_p", "stream")
        }
        stop = {"stop": self.stop_sequences} if self.stop_sequences else {}
        given = {name: value for name, value in same.items() if value is not None}
        return {**super()._chat(variables, reasons=reasons, skip_tools=skip_tools), **given, **stop}


def _function(tool: ToolDefinition) -> dict[str, Any]:
    values = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


def _text(content: str | Iterable[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(each.text for each in content)


def _message(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def _messages(turn: Message) -> list[dict[str, Any]]:
    """A turn as messages of a chat."""
    if isinstance(turn.content, str):
        return [_message(turn.role, turn.content)]
    results = [_result(each) for each in turn.content if isinstance(each, ToolResultBlock)]
    text = "\n".join(each.text for each in turn.content if isinstance(each, TextBlock))
    calls = [_call(each) for each in turn.content if isinstance(each, ToolUseBlock)]
    thoughts = "\n".join(each.thinking for each in turn.content if isinstance(each, ThinkingBlock))
    if turn.role == "system":
        if results or calls or thoughts:
            raise ApiError(400, "messages: the content of a system message must be text", param="messages")
        return [_message("system", text)]
    if turn.role == "user":
        if calls or thoughts:
            raise ApiError(
                400, "messages: tool_use and thinking blocks belong to the assistant, not to the user", param="messages"
            )
        said = any(isinstance(each, TextBlock) for each in turn.content) or not results
        return [*results, *([_message("user", text)] if said else [])]
    if results:
        raise ApiError(400, "messages: tool_result blocks belong to the user, not to the assistant", param="messages")
    others: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts:
        others["reasoning_content"] = thoughts
    return [_message("assistant", text or None, **others)]


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = ("Error: " if block.is_error else "") + _text(block.content)
    return _message("tool", text, tool_call_id=block.tool_use_id)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
