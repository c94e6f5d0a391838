"""The fields of OpenAI's requests, and which values they take.

Every field is applied, or refused with a reason; a few are accepted without effect (ACCEPTED). null is the same as
leaving a field out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ingot.runtime.answers.tools import MOST_TOOLS
from ingot.runtime.chat_template import with_object

MAX_CHOICES = 128  # OpenAI's limit of n
MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_STOPS = 64
MAX_NAMED = 4096  # tokens or words in one list
MAX_LOGPROBS = 20
MAX_TOOLS = MOST_TOOLS

ACCEPTED = {
    "user": "who asks",
    "metadata": "notes of the client",
    "store": "only false: nothing is stored",
    "service_tier": 'only "auto" and "default": there is one tier',
    "safety_identifier": "who asks",
    "prompt_cache_key": "equal heads share blocks whatever the key; cache_salt keeps them apart",
}
"""Fields without effect → why that is no lie."""

_NOT_YET = "it does not exist in this version"
_TEXT_ONLY = "the engine reads and writes text only"
REFUSED: Mapping[str, str] = {
    "functions": "say tools",
    "function_call": "say tool_choice",
    "best_of": "the server does not rank completions: give n and choose one yourself (best_of 1 with n 1 is accepted)",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "prediction": "drafts are looked up in the prompt, with ingot serve --speculative_config: put the text there",
    "verbosity": "pass what the chat template knows through chat_template_kwargs",
    "web_search_options": "the server searches nothing",
    "moderation": "the server moderates nothing",
    "prompt_cache_retention": "cached blocks stay while there is room",
    "prompt_cache_options": "cached blocks stay while there is room",
    "use_beam_search": f"beam search: {_NOT_YET}",
    "chat_template": "templates are the server's: ingot serve --chat_template FILE",
}
"""Fields of OpenAI's, or of other servers', that cannot be applied → why."""


def _refuse_many(value: object) -> object:
    """Before a complaint about each."""
    if isinstance(value, dict) and len(value) > MAX_NAMED:
        raise PydanticCustomError("too_long", "There should be at most {most} entries", {"most": MAX_NAMED})
    return value


# Lists have an end and stop at their first mistake: whatever a client sends is read in milliseconds.
Count = Annotated[int, Field(ge=0)]
Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Token], Field(max_length=MAX_NAMED, fail_fast=True)]
Words = Annotated[list[Text], Field(max_length=MAX_NAMED, fail_fast=True)]
Ids = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Batch = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]  # OpenAI's ranges, here and below
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[TokenKey, Bias], Field(max_length=MAX_NAMED), pydantic.BeforeValidator(_refuse_many)]
Seconds = Annotated[float, Field(gt=0)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("no_object", "Input should be the JSON schema of an object")
    return schema


ToolSchema = Annotated[dict[str, Any], pydantic.AfterValidator(_of_object)]
"""The parameters of a tool."""


class Fields(BaseModel):
    """What all objects have in common: no unknown fields, no values turned into other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _stop_at_many(cls, value: object) -> object:
        """Name one unknown field, not all."""
        if not isinstance(value, dict):
            return value
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = [name for name in value if name not in known]
        return {name: value[name] for name in (*known, *unknown[:1]) if name in value}


class Body(Fields):
    """What all bodies have in common. refused: fields of this body that cannot be applied, beside REFUSED → why."""

    refused: ClassVar[Mapping[str, str]] = {}
    model: str | None = None


class StreamOptions(Fields):
    """include_usage: a last piece with the counts of tokens. include_obfuscation: without effect, none is padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Fields):
    """A named schema. It is enforced whatever `strict` says."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """json_object may have a schema, as in llama.cpp."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Generate(Body):
    """What completions and chat completions share."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # beyond OpenAI's: extra_body of its client
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Count = 0
    stop_token_ids: Tokens = []
    bad_words: Words = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False
    resume_token_ids: Annotated[list[Token], Field(fail_fast=True)] = Field(
        [], description="Tokens of this answer that another server has streamed; this one goes on behind them."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None, description="Keep this many tokens at the end of the prompt; -1: as many as the engine takes."
    )
    # what the answer must look like, under every name that clients have for it; at most one of them
    response_format: ResponseFormat | None = None  # OpenAI's
    structured_outputs: dict[str, Any] | None = None  # vLLM's
    guided_json: str | dict[str, Any] | None = None  # its older names
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_NAMED, fail_fast=True)] | None = None
    guided_grammar: Text | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: Text | None = None
    grammar: Text | None = None  # llama.cpp's
    json_schema: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    cache_salt: str = ""
    timeout: Seconds | None = Field(None, description="Seconds from arrival to end; at most the server's.")
    # without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Generate):
    """POST /v1/completions. prompt: text, token ids, or a batch of either."""

    prompt: Annotated[str | Ids | Texts | Batch, Field(union_mode="left_to_right")]
    suffix: str | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The batch, one entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Fields):
    """A piece of a message. prompt_cache_breakpoint: without effect, equal heads share blocks."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class CalledFunction(BaseModel):
    """What a call of an earlier answer called. Further fields are the template's."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: Text
    arguments: str | dict[str, Any] | None = None


class EarlierCall(BaseModel):
    """A call of an earlier answer. Further fields are the template's."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Fields):
    """One message; tool calls and their results are history, which the template writes. What OpenAI's clients repeat
    of an answer (audio, function_call, annotations) must hold nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_NAMED, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_NAMED, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its newer name
    id: str | None = None  # without effect
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> "ChatMessage":
        """An assistant may have called tools instead, or refused."""
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", "content is missing: role {role}", {"role": self.role})
        return self

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: text in one piece, arguments of tools as objects, `developer` under its old name."""
        values = self.model_dump(exclude_none=True, exclude={"annotations", "id", "reasoning"})
        if self.reasoning is not None:
            values.setdefault("reasoning_content", self.reasoning)
        if isinstance(self.content, list):
            values["content"] = "\n".join(part.text for part in self.content)
        if self.role == "developer":
            values["role"] = "system"
        if self.tool_calls:
            values["tool_calls"] = list(map(with_object, values["tool_calls"]))
        return values


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(Generate):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    echo: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages through the chat template."""

    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Effort | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: Annotated[list[Token], Field(fail_fast=True)]


class PrefillRequest(Body):
    """POST /kv/prefill. token_ids: of whole blocks. first_block: of those that the decode server lacks. transport: how
    it fetches them."""

    engine: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    token_ids: Ids
    cache_salt: str = ""
    first_block: Count = 0
    transport: Literal["auto", "nixl"] = "auto"


class StallRequest(Body):
    """POST /debug/stall."""

    seconds: Annotated[float, Field(gt=0, le=600)]
