"""The fields of OpenAI's requests: a body → a typed request, or a refusal that names the field.

Every field is applied, or refused with a reason; a few are accepted without effect (ACCEPTED). null is the same as
leaving a field out.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from ingot.runtime.server.api_error import ApiError

MAX_CHOICES = 128  # OpenAI's limit of n
MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_STOPS = 64
MAX_LOGPROBS = 20

ACCEPTED = {
    "user": "who asks",
    "metadata": "notes of the client",
    "store": "only false: nothing is stored",
    "service_tier": 'only "auto": there is one tier',
    "safety_identifier": "who asks",
    "prompt_cache_key": "equal heads share blocks whatever the key; cache_salt keeps them apart",
}
"""Fields without effect → why that is no lie."""

_NOT_YET = "it does not exist in this version"
_TEXT_ONLY = "the engine reads and writes text only"
REFUSED: Mapping[str, str] = {
    "response_format": "guided decoding does not exist in this version: nothing would enforce it",
    "tools": "tool calls do not exist in this version: nothing would parse them",
    "tool_choice": "tool calls do not exist in this version",
    "parallel_tool_calls": "tool calls do not exist in this version",
    "functions": "tool calls do not exist in this version",
    "function_call": "tool calls do not exist in this version",
    "best_of": "n gives several completions; ranking them is the client's",
    "suffix": "filling in the middle does not exist in this version",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "prediction": f"speculation: {_NOT_YET}",
    "reasoning_effort": "pass what the chat template knows through chat_template_kwargs",
    "verbosity": "pass what the chat template knows through chat_template_kwargs",
    "web_search_options": "the server searches nothing",
    "moderation": "the server moderates nothing",
    "prompt_cache_retention": "cached blocks stay while there is room",
    "prompt_cache_options": "cached blocks stay while there is room",
    "guided_json": f"guided decoding: {_NOT_YET}",
    "guided_regex": f"guided decoding: {_NOT_YET}",
    "guided_choice": f"guided decoding: {_NOT_YET}",
    "guided_grammar": f"guided decoding: {_NOT_YET}",
    "use_beam_search": f"beam search: {_NOT_YET}",
    "chat_template": "templates are the server's: ingot serve --chat_template FILE",
}
"""Fields of OpenAI's, or of other servers', that cannot be applied → why."""

# values of refused fields that ask for nothing
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "best_of": (1,),
    "modalities": (["text"],),
    "use_beam_search": (False,),
}

Count = Annotated[int, Field(ge=0)]
Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Token], Field(min_length=1, fail_fast=True)]  # one complaint, however long the list
Batch = Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]  # OpenAI's ranges, here and below
Bias = Annotated[float, Field(ge=-100, le=100)]
Seconds = Annotated[float, Field(gt=0)]


class Body(BaseModel):
    """What all bodies have in common: no unknown fields, no values turned into other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None


class StreamOptions(BaseModel):
    """include_usage: a last piece with the counts of tokens. include_obfuscation: only false."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Generate(Body):
    """What completions and chat completions share."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # beyond OpenAI's: extra_body of its client
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Count = 0
    stop_token_ids: list[Token] = []
    bad_words: list[Text] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    cache_salt: str = ""
    timeout: Seconds | None = Field(None, description="Seconds from arrival to end; at most the server's.")
    # without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Generate):
    """POST /v1/completions. prompt: text, token ids, or a batch of either."""

    prompt: Annotated[str | Ids | Batch, Field(union_mode="left_to_right")]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """The batch, one entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; tool calls and their results are history, which the template writes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: text in one piece, `developer` under its old name."""
        values = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            values["content"] = "\n".join(part.text for part in self.content)
        if self.role == "developer":
            values["role"] = "system"
        return values


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(Generate):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages through the chat template."""

    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Messages | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: Annotated[list[Token], Field(fail_fast=True)]


class StallRequest(Body):
    """POST /debug/stall."""

    seconds: Annotated[float, Field(gt=0, le=600)]


AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], data: bytes) -> AnyBody:
    """JSON → a request. Raises ApiError 400 that names the field."""
    try:
        document = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, value in document.items():
        neutral = (None, *_NEUTRAL.get(name, ())) if name in REFUSED else ()
        if name not in kind.model_fields and value not in neutral:
            raise _unknown(name, kind)
    given = {name: value for name, value in document.items() if value is not None and name in kind.model_fields}
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        raise _wrong(error) from None


def _unknown(name: str, kind: type[Body]) -> ApiError:
    if name in REFUSED:
        return ApiError(400, f"{name!r} is refused: {REFUSED[name]}", param=name, code="unsupported_parameter")
    near = difflib.get_close_matches(name, kind.model_fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ApiError(400, f"unknown field {name[:100]!r}{hint}", param=name[:100], code="unknown_parameter")


def _wrong(error: pydantic.ValidationError) -> ApiError:
    """The first complaint; of a union, that of the branch which came nearest: right types first, then the depth."""
    found = error.errors(include_url=False, include_context=False)
    places = [[str(part) for part in each["loc"] if not _is_type_name(part)] for each in found]

    def nearness(index: int) -> tuple[bool, int]:
        return not found[index]["type"].endswith("_type"), len(places[index])

    same_field = [index for index in range(len(found)) if places[index][:1] == places[0][:1]]
    nearest = max(same_field, key=nearness)
    first, place = found[nearest], ".".join(places[nearest])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {place!r}", param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place!r} is missing", param=place, code="missing_required_parameter")
    shown = repr(first["input"])
    got = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return ApiError(400, f"{place}: {first['msg']}; got {got}", param=place, code="invalid_value")


def _is_type_name(part: int | str) -> bool:
    """Unions put the name of the branch into the place."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or part in ("TextPart", "ChatMessage"))
