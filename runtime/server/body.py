"""The body of a request → its fields, or a refusal that names the field: 400."""

import codecs
import difflib
import json
import reprlib
from collections.abc import Mapping
from typing import TypeVar

import pydantic
from pydantic_core import from_json

from ingot.runtime.server.api_error import ApiError
from ingot.runtime.server.protocol import REFUSED, Body, ChatRequest

# values of refused fields that ask for nothing
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # of no tools, as are the others
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),  # the defaults of OpenAI and Anthropic, from here on
    "prompt_cache_retention": ("in_memory",),
    "context_management": ([],),
    "mcp_servers": ([],),
    "speed": ("standard",),
}

_TEXT_ONLY = "the engine reads and writes text only"
_MEDIA = frozenset(  # types of a message's parts that are no text
    {
        *("image", "image_url", "input_image", "input_audio", "audio", "audio_url", "video", "video_url"),
        *("file", "input_file", "document"),
    }
)
_SHOWN = reprlib.Repr()  # writes no more of a value than people read
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 100
AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], data: bytes) -> AnyBody:
    """JSON → a request. Raises ApiError 400 that names the field."""
    data = data.removeprefix(codecs.BOM_UTF8)  # RFC 8259 lets parsers ignore it, and some editors write it
    try:
        document = from_json(data, allow_inf_nan=False)
        json.loads(data, object_pairs_hook=_refuse_twice)  # pydantic's parser takes the last one
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, value in document.items():
        if name not in kind.model_fields and not _asks_for_nothing(name, value, document, kind):
            raise _unknown(name, kind)
    return validated(kind, {name: value for name, value in document.items() if name in kind.model_fields})


def validated(kind: type[AnyBody], fields: Mapping[str, object]) -> AnyBody:
    """Fields → a request; null is the same as leaving a field out. Raises ApiError 400 that names the field."""
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except pydantic.ValidationError as error:
        raise _wrong(error) from None


def _refuse_twice(pairs: list[tuple[str, object]]) -> None:
    """A field that is there twice is applied once: the other one would be ignored."""
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ApiError(400, f"the field {name[:100]!r} is there twice", param=name[:100], code="invalid_value")
        names.add(name)


def _asks_for_nothing(name: str, value: object, document: Mapping[str, object], kind: type[Body]) -> bool:
    """Whether a refused field has a value that changes nothing."""
    if name == "best_of":
        return value is None or (type(value) is int and value == document.get("n", 1) == 1)
    neutral = any(type(value) is type(each) and value == each for each in _NEUTRAL.get(name, ()))
    known = name in REFUSED or name in kind.refused or name in ChatRequest.model_fields
    return known and (value is None or neutral)


def _unknown(name: str, kind: type[Body]) -> ApiError:
    why = kind.refused.get(name) or REFUSED.get(name)
    if why is not None:
        return ApiError(400, f"{name!r} is refused: {why}", param=name, code="unsupported_parameter")
    if name in ChatRequest.model_fields:
        return ApiError(400, f"{name!r} is refused: only chats have it", param=name, code="unsupported_parameter")
    near = difflib.get_close_matches(name[:100], kind.model_fields, n=1)
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
    for each in found:
        given = each["input"].get("type") if isinstance(each["input"], dict) else each["input"]
        if isinstance(given, str) and given in _MEDIA and each["type"] in ("literal_error", "union_tag_invalid"):
            return ApiError(400, f"{given!r} is refused: {_TEXT_ONLY}", param=place, code="unsupported_value")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {place!r}", param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place!r} is missing", param=place, code="missing_required_parameter")
    return ApiError(
        400, f"{place}: {first['msg']}; got {_SHOWN.repr(first['input'])}", param=place, code="invalid_value"
    )


def _is_type_name(part: int | str) -> bool:
    """Unions put the name of the branch into the place."""
    return isinstance(part, str) and (part in ("str", "int", "constrained-str") or part[:1].isupper() or "[" in part)
