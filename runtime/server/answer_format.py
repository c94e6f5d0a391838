"""What a request says of its answer's form, under the names of OpenAI, vLLM and llama.cpp → StructuredOutputs."""

from typing import Any

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.server.api_error import ApiError, in_one_line
from ingot.runtime.server.protocol import Generate, ResponseFormat

_OLD = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""vLLM's older names and llama.cpp's → the newer ones."""


def names_of_form(asked: Generate) -> dict[str, str]:
    """What errors call the form of the answer → the field by which this request gives it."""
    forms = ("response_format", *_OLD)
    given = next((each for each in forms if getattr(asked, each) not in (None, False)), None)
    return {} if given is None else {"structured_outputs": given}


def structured_outputs(asked: Generate) -> StructuredOutputs | None:
    """None: any text. Raises ApiError."""
    found: dict[str, dict[str, Any]] = {}
    if asked.response_format is not None and asked.response_format.type != "text":
        found["response_format"] = _of_format(asked.response_format)
    if asked.structured_outputs is not None:
        found["structured_outputs"] = asked.structured_outputs
    for old, new in _OLD.items():
        value = getattr(asked, old)
        if value is not None and value is not False:
            found[old] = {new: value}
    if len(found) > 1:
        raise _wrong(list(found)[1], f"{' and '.join(found)} set the same thing; give one of them")
    white = asked.guided_whitespace_pattern
    if not found:
        if white is not None:
            raise _wrong("guided_whitespace_pattern", "guided_whitespace_pattern needs guided_json")
        return None
    ((name, values),) = found.items()
    if white is not None:
        values = {**values, "whitespace_pattern": white}
    try:
        return StructuredOutputs(**values)
    except RequestError as error:
        raise _wrong(name, in_one_line(error)) from None


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        if form.json_schema is not None:
            raise _wrong("response_format.json_schema", 'response_format: json_schema needs type "json_schema"')
        return {"json_object": True} if form.schema_ is None else {"json": form.schema_}
    schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
    if schema is None:
        raise _wrong("response_format.json_schema", "response_format: json_schema.schema is missing")
    return {"json": schema}


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
