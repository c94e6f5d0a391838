"""Tools → a grammar in Lark of answers that call them, in the wire format of the model.

required    start: SPACE section_begin call (between call)* section_end
auto        start: (text call)* text
call        begin "name" ... arguments ... end, one of them for each tool
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.answers.arguments import resolved, types_of
from ingot.runtime.answers.tools import Tool, ToolUse
from ingot.runtime.answers.wire_format import (
    BareKeys,
    Harmony,
    JsonArguments,
    JsonCalls,
    Parameters,
    Python,
    ReasoningFormat,
    WireFormat,
)
from ingot.runtime.guided.grammars import TEXT, quoted, schema_text, text_as_regex

_SPACE = r"/[ \n\r\t]{0,8}/"
_PLAIN_KEYS = {"type", "description", "title", "default", "examples", "deprecated", "anyOf", "oneOf", "nullable"}
_DEEPEST = 16  # values within values


class ToolGrammar:
    """The grammar of one request.

    wire       text → how Lark spells it, with control tokens for what they read like
    reasoning  its marks around an answer, and behind all of it, may stand there; None: there are no such marks
    """

    def __init__(
        self, form: WireFormat, use: ToolUse, wire: Callable[[str], str], reasoning: ReasoningFormat | None = None
    ) -> None:
        self._form, self._use, self._wire, self._reasoning = form, use, wire, reasoning
        self._lines: list[str] = []

    def text(self, other: str | None = None) -> str:
        """The grammar. other: a rule of answers that call nothing, in place of any text."""
        calls = " | ".join(self._named(self._call(tool), "call") for tool in self._use.callable)
        self._rule("call", calls)
        start = self._required() if self._use.needs else self._auto(other)
        return "\n".join([f"start: {start}", *self._lines])

    def _rule(self, name: str, body: str) -> str:
        self._lines.append(f"{name}: {body}")
        return name.removesuffix("[lazy]")

    def _named(self, body: str, kind: str, *, lazy: bool = False) -> str:
        """A rule with a name of its own."""
        return self._rule(f"{kind}_{len(self._lines)}{'[lazy]' if lazy else ''}", body)

    # The whole answer.

    def _required(self) -> str:
        if isinstance(self._form.coding, Harmony):
            return f"({self._wire('<|channel|>analysis<|message|>')} {TEXT} {self._next_message})* call"
        section = ("", "") if self._form.whole else self._form.section
        calls = _joined(self._wire(section[0]), self._list(), self._wire(section[1]))
        return _joined(self._marked(TEXT), _SPACE, calls, self._rest())

    def _marked(self, text: str) -> str:
        """A rule between the marks of an answer, or behind a prompt with the first one; "": free text can hold them."""
        begin, end = ("", "") if self._reasoning is None else map(self._wire, self._reasoning.answer)
        return f"(({_SPACE} {begin})? ({text}) {end})?" if begin.startswith("<[") and end.startswith("<[") else ""

    def _rest(self) -> str:
        """The mark behind all of an answer, which may be left out."""
        rest = "" if self._reasoning is None else self._wire(self._reasoning.rest)
        return f"({rest})?" if rest.startswith("<[") else ""

    @property
    def _next_message(self) -> str:
        return self._wire("<|end|><|start|>assistant")

    def _list(self) -> str:
        """One call, or several."""
        listed = isinstance(self._form.coding, JsonCalls | Python) and self._form.coding.listed
        between = f'"," {_SPACE}' if listed else self._wire(self._form.between)
        several = self._use.parallel and not isinstance(self._form.coding, Harmony)
        calls = f"call ({_joined(between, 'call')})*" if several else "call"
        return f'"[" {_SPACE} {calls} {_SPACE} "]"' if listed else calls

    def _auto(self, other: str | None) -> str:
        """Text, and calls behind it."""
        form = self._form
        if isinstance(form.coding, Harmony):
            message = _joined(self._wire("<|channel|>final<|message|>"), other or TEXT)
            preamble = self._wire("<|channel|>commentary<|message|>")
            thoughts = self._wire("<|channel|>analysis<|message|>")
            return f"(({thoughts} | {preamble}) {TEXT} {self._next_message})* (call | {message})"
        if form.whole or other is not None:
            text = r"/[^{\[< \n\r\t](.|\n)*/" if other is None else other
            marked = self._marked(text)
            answers = _joined(marked, _SPACE, self._rest()) if marked else ""
            return f"{self._required()} | {_SPACE} ({text})?" + (f" | {answers}" if answers else "")
        if form.section[0]:
            calls = _joined(self._until(form.section[0]), self._list(), self._wire(form.section[1]))
        else:
            bodies = [self._named(self._call(tool, begin=""), "body") for tool in self._use.callable]
            calls = f"{self._until(form.begin)} ({' | '.join(bodies)})"
        several = self._use.parallel and not form.section[0]
        return _joined(self._marked(TEXT), f"({calls}){'*' if several else '?'} {TEXT}", self._rest())

    def _until(self, end: str) -> str:
        """Any text, and then this one."""
        parts = self._wire(end)
        if parts.startswith("<["):
            return f"{TEXT} {parts}"
        head, _, rest = parts.partition(" <[")
        text = text_as_regex(json.loads(head))
        if rest:
            return f"{self._named(f'{TEXT[:-1]}{text}/', 'text')} <[{rest}"
        return self._named(f"{TEXT[:-1]}{text}/", "text", lazy=True)

    # One call.

    def _call(self, tool: Tool, begin: str | None = None) -> str:
        form, coding = self._form, self._form.coding
        begin = form.begin if begin is None else begin
        if isinstance(coding, Harmony):
            head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
            return _joined(self._wire(head), self._json(tool.parameters))
        if isinstance(coding, JsonCalls):
            head = f"{{{quoted(coding.name)}: {quoted(tool.name)}, {quoted(coding.arguments)}: "
            body = f"{quoted(head)} {self._json(tool.parameters)} {quoted('}')}"
            return _joined(self._wire(begin), body, self._wire(form.end))
        if isinstance(coding, Python):
            named = [(f"{quoted(f'{key}=')} {self._json(each, tool)}", key) for key, each in _properties(tool)]
            body = f"{quoted(f'{tool.name}(')} {self._some(named, tool, ', ')} {quoted(')')}"
            return _joined(self._wire(begin), body, self._wire(form.end))
        name = _joined(self._wire(begin + form.prefix), quoted(tool.name), self._wire(form.after_name))
        if form.call_id:
            head = _joined(self._wire(begin + form.prefix), quoted(tool.name))
            given = f"({self._wire(form.call_id)} /[a-zA-Z0-9]{{9}}/)?"
            name = _joined(head, given, self._wire(form.after_name))
        if form.number_end:
            name = _joined(name, "/[0-9]{1,3}/", self._wire(form.number_end))
        return _joined(name, self._arguments(coding, tool), self._wire(form.end))

    def _arguments(self, coding: JsonArguments | Parameters | BareKeys, tool: Tool) -> str:
        if isinstance(coding, JsonArguments):
            return _joined(self._wire(coding.before), self._json(tool.parameters), self._wire(coding.after))
        if isinstance(coding, BareKeys):
            return f"{self._bare_fields(coding, tool.parameters, tool, _DEEPEST)} {quoted('}')}"
        named = [(self._parameter(coding, key, each, tool), key) for key, each in _properties(tool)]
        return self._some(named, tool, "")

    def _json(self, schema: Any, tool: Tool | None = None) -> str:
        """A value as JSON. tool: whose definitions the schema refers to."""
        return self._named(f"%json {schema_text(_with_definitions(schema, tool))}", "json")

    def _some(self, named: Sequence[tuple[str, str]], tool: Tool, separator: str) -> str:
        """Those that the tool requires, and any of the others, in the order of the schema."""
        required = set(tool.parameters.get("required") or ())
        return self._series([(body, key in required) for body, key in named], separator)

    def _series(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """(what, whether it must be there), with a separator between those that are there."""
        first, rest = '""', '""'  # of the parts from a place on: as the first ones, and behind others
        for body, needed in reversed(parts):
            part = self._named(body, "part")
            behind = _joined(quoted(separator) if separator else "", part)
            first, rest = (
                self._named(f"{part} {rest}" if needed else f"{part} {rest} | {first}", "first"),
                self._named(f"{behind} {rest}" if needed else f"({behind})? {rest}", "rest"),
            )
        return first

    # Values that are not JSON.

    def _parameter(self, form: Parameters, key: str, schema: Any, tool: Tool) -> str:
        found = _at(schema, tool)
        kinds = types_of(found, tool.parameters)
        is_text = not kinds or "string" in kinds
        head = _joined(self._wire(form.begin), quoted(key), self._wire(form.after_key))
        if form.after_type:
            other = form.types[1] or next(iter(sorted(kinds)), "")
            head = _joined(head, quoted(form.types[0] if is_text else other), self._wire(form.after_type))
        choices = _choices(found)
        if choices is not None:
            return _joined(head, _one_of(choices), self._wire(form.end))
        if not is_text:
            return _joined(head, self._json(found, tool), self._wire(form.end))
        return _joined(head, self._free_text(found, key, tool, form.end))

    def _free_text(self, schema: Mapping[str, Any], key: str, tool: Tool, end: str) -> str:
        """A string that is written as it is, and its end."""
        unions = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
        for each in (schema, *unions):
            beyond = each.keys() - _PLAIN_KEYS if isinstance(each, Mapping) else {"a schema"}
            if beyond:
                raise RequestError(
                    "tools: this model writes strings without quotes, and there this is not enforced",
                    where=f"{tool.name}.parameters.properties.{key}",
                    got=", ".join(sorted(beyond))[:100],
                    hint="leave it out, or let the tool check it",
                )
        return self._until(end)

    def _bare_fields(self, form: BareKeys, schema: Mapping[str, Any], tool: Tool, deep: int) -> str:
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        return self._series(
            [
                (f"{quoted(f'{key}:')} {self._bare(form, each, key, tool, deep - 1)}", key in required)
                for key, each in properties.items()
            ],
            ",",
        )

    def _bare(self, form: BareKeys, schema: Any, key: str, tool: Tool, deep: int) -> str:
        found = _at(schema, tool)
        kinds, choices = types_of(found, tool.parameters), _choices(found)
        if choices is not None:
            return _joined(self._wire(form.quote), _one_of(choices), self._wire(form.quote))
        if kinds == {"string"}:
            return _joined(self._wire(form.quote), self._free_text(found, key, tool, form.quote))
        if kinds == {"object"} and deep:
            return f"{quoted('{')} {self._bare_fields(form, found, tool, deep)} {quoted('}')}"
        if kinds == {"array"} and deep and "items" in found:
            each = self._named(self._bare(form, found["items"], key, tool, deep - 1), "item")
            return f'"[" ({each} ("," {each})*)? "]"'
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return self._json(found, tool)
        raise RequestError(
            "tools: this model's own form of arguments cannot be held to this schema",
            where=f"{tool.name}.parameters.{key}",
            got=json.dumps(found, default=str)[:150],
            hint="give each value one type",
        )


def _properties(tool: Tool) -> list[tuple[str, Any]]:
    found = tool.parameters.get("properties")
    return list(found.items()) if isinstance(found, Mapping) else []


def _at(schema: Any, tool: Tool) -> dict[str, Any]:
    """A schema itself, where it refers to another one."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = resolved(schema["$ref"], tool.parameters)
    return dict(schema) if isinstance(schema, Mapping) else {}


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a value may have, where it must be one of some."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values and all(isinstance(each, str) for each in values) else None


def _one_of(texts: Sequence[str]) -> str:
    return f"({' | '.join(map(quoted, texts))})"


def _with_definitions(schema: Any, tool: Tool | None) -> Any:
    if tool is None or not isinstance(schema, Mapping):
        return schema
    kept = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    return {**kept, **schema}


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))
