"""Sampling parameters of a request with tools: the grammar that holds its answer to what it promises."""

import dataclasses
import re

from ingot.configs.sampling import SamplingParams
from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.answers.answer_formats import AnswerFormats
from ingot.runtime.answers.tool_grammar import ToolGrammar
from ingot.runtime.answers.tools import ToolUse
from ingot.runtime.guided.grammars import choice_as_regex, schema_text
from ingot.runtime.guided.guides import Guides


def with_tools(params: SamplingParams, use: ToolUse, formats: AnswerFormats, guides: Guides) -> SamplingParams:
    """The same parameters where tools may be called, or not, without promises. Raises RequestError."""
    if not use.callable:
        return params
    if formats.wire is None:
        raise RequestError(
            "tools: how this model writes calls is not known from its chat template",
            where="tools",
            hint="name it: ingot serve --tool_parser NAME or LLM(..., tool_parser=NAME); or leave tools out",
        )
    asked = params.structured_outputs
    if not use.constrained and asked is None:
        return params
    if asked is not None and use.needs:
        raise RequestError(
            "tool_choice: an answer that must call a tool cannot have another form", hint="leave one out"
        )
    other = None if asked is None else _rule(asked)
    try:
        text = ToolGrammar(formats.wire, use, guides.wire, formats.reasoning).text(other)
        found = StructuredOutputs(grammar=text)
        guides.matcher(found)
    except RequestError as error:
        if error.got is not None:
            _blame(use, guides)
        raise
    return dataclasses.replace(params, structured_outputs=found)


def _rule(asked: object) -> str:
    """A form of answers as the body of a rule."""
    assert isinstance(asked, StructuredOutputs), "SamplingParams has read it"
    if asked.json is not None or asked.json_object:
        return f"%json {schema_text(asked.schema, asked)}"
    if asked.choice is not None:
        return f"/{choice_as_regex(asked.choice)}/"
    raise RequestError(
        "structured_outputs beside tools must be json, json_object or choice", hint="leave tools out, or use JSON"
    )


def _blame(use: ToolUse, guides: Guides) -> None:
    """Name the tool whose schema cannot be enforced."""
    for tool in use.callable:
        try:
            guides.compile("json_schema", schema_text(tool.parameters))
        except RequestError as error:
            where = f"parameters of {tool.name}" + ("" if error.where is None else f", {error.where}")
            what = re.sub(r"^structured_outputs(\.json)?:? ", "tools: ", error.what)
            raise RequestError(
                what, where=where, expected=error.expected, got=error.got, hint=error.hint or "change it"
            ) from None
