"""Tools → a grammar in Lark of answers that call them, in the wire format of the model.

required    start: SPACE section_begin call (between call)* section_end
auto        start: (text call)* text
call        begin "name" ... arguments ... end, one of them for each tool
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.answers.arguments import types_of
from ingot.runtime.answers.element_grammar import ElementGrammar
from ingot.runtime.answers.grammar_rules import DEEPEST, GrammarRules, at, choices, fields, joined, one_of
from ingot.runtime.answers.tools import Tool, ToolUse
from ingot.runtime.answers.wire_format import (
    BareKeys,
    Elements,
    Harmony,
    JsonArguments,
    JsonCalls,
    Parameters,
    Python,
    ReasoningFormat,
    WireFormat,
)
from ingot.runtime.guided.grammars import TEXT, quoted

_SPACE = r"/[ \n\r\t]{0,8}/"


class ToolGrammar:
    """The grammar of one request.

    wire       text → how Lark spells it, with control tokens for what they read like
    reasoning  its marks around an answer, and behind all of it, may stand there; None: there are no such marks
    """

    def __init__(
        self, form: WireFormat, use: ToolUse, wire: Callable[[str], str], reasoning: ReasoningFormat | None = None
    ) -> None:
        self._form, self._use, self._wire, self._reasoning = form, use, wire, reasoning
        self._rules = GrammarRules(wire)

    def text(self, other: str | None = None) -> str:
        """The grammar. other: a rule of answers that call nothing, in place of any text."""
        calls = " | ".join(self._rules.named(self._call(tool), "call") for tool in self._use.callable)
        self._rules.rule("call", calls)
        start = self._required() if self._use.needs else self._auto(other)
        return "\n".join([f"start: {start}", *self._rules.lines])

    # The whole answer.

    def _required(self) -> str:
        if isinstance(self._form.coding, Harmony):
            return f"({self._wire('<|channel|>analysis<|message|>')} {TEXT} {self._next_message})* call"
        section = ("", "") if self._form.whole else self._form.section
        calls = joined(self._wire(section[0]), self._list(), self._wire(section[1]))
        return joined(self._marked(TEXT), _SPACE, calls, self._rest())

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
        calls = f"call ({joined(between, 'call')})*" if several else "call"
        return f'"[" {_SPACE} {calls} {_SPACE} "]"' if listed else calls

    def _auto(self, other: str | None) -> str:
        """Text, and calls behind it."""
        form = self._form
        if isinstance(form.coding, Harmony):
            message = joined(self._wire("<|channel|>final<|message|>"), other or TEXT)
            preamble = self._wire("<|channel|>commentary<|message|>")
            thoughts = self._wire("<|channel|>analysis<|message|>")
            return f"(({thoughts} | {preamble}) {TEXT} {self._next_message})* (call | {message})"
        if form.whole or other is not None:
            text = r"/[^{\[< \n\r\t](.|\n)*/" if other is None else other
            marked = self._marked(text)
            answers = joined(marked, _SPACE, self._rest()) if marked else ""
            return f"{self._required()} | {_SPACE} ({text})?" + (f" | {answers}" if answers else "")
        if form.section[0]:
            calls = joined(self._rules.until(form.section[0]), self._list(), self._wire(form.section[1]))
        else:
            bodies = [self._rules.named(self._call(tool, begin=""), "body") for tool in self._use.callable]
            calls = f"{self._rules.until(form.begin)} ({' | '.join(bodies)})"
        several = self._use.parallel and not form.section[0]
        return joined(self._marked(TEXT), f"({calls}){'*' if several else '?'} {TEXT}", self._rest())

    # One call.

    def _call(self, tool: Tool, begin: str | None = None) -> str:
        form, coding = self._form, self._form.coding
        begin = form.begin if begin is None else begin
        if isinstance(coding, Harmony):
            head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
            return joined(self._wire(head), self._rules.json(tool.parameters))
        if isinstance(coding, JsonCalls):
            head = f"{{{quoted(coding.name)}: {quoted(tool.name)}, {quoted(coding.arguments)}: "
            body = f"{quoted(head)} {self._rules.json(tool.parameters)} {quoted('}')}"
            return joined(self._wire(begin), body, self._wire(form.end))
        if isinstance(coding, Python):
            named = [
                (f"{quoted(f'{key}=')} {self._rules.json(each, tool)}", key) for key, each in fields(tool.parameters)
            ]
            body = f"{quoted(f'{tool.name}(')} {self._some(named, tool, ', ')} {quoted(')')}"
            return joined(self._wire(begin), body, self._wire(form.end))
        name = joined(self._wire(begin + form.prefix), quoted(tool.name), self._wire(form.after_name))
        if form.call_id:
            head = joined(self._wire(begin + form.prefix), quoted(tool.name))
            given = f"({self._wire(form.call_id)} /[a-zA-Z0-9]{{9}}/)?"
            name = joined(head, given, self._wire(form.after_name))
        if form.number_end:
            name = joined(name, "/[0-9]{1,3}/", self._wire(form.number_end))
        return joined(name, self._arguments(coding, tool), self._wire(form.end))

    def _arguments(self, coding: JsonArguments | Parameters | BareKeys | Elements, tool: Tool) -> str:
        if isinstance(coding, JsonArguments):
            return joined(self._wire(coding.before), self._rules.json(tool.parameters), self._wire(coding.after))
        if isinstance(coding, BareKeys):
            return f"{self._bare_fields(coding, tool.parameters, tool, DEEPEST)} {quoted('}')}"
        if isinstance(coding, Elements):
            return ElementGrammar(self._rules, coding, tool).arguments()
        named = [(self._parameter(coding, key, each, tool), key) for key, each in fields(tool.parameters)]
        return self._some(named, tool, "")

    def _some(self, named: Sequence[tuple[str, str]], tool: Tool, separator: str) -> str:
        """Those that the tool requires, and any of the others, in the order of the schema."""
        required = set(tool.parameters.get("required") or ())
        return self._rules.series([(body, key in required) for body, key in named], separator)

    # Values that are not JSON.

    def _parameter(self, form: Parameters, key: str, schema: Any, tool: Tool) -> str:
        found = at(schema, tool)
        kinds = types_of(found, tool.parameters)
        is_text = not kinds or "string" in kinds
        head = joined(self._wire(form.begin), quoted(key), self._wire(form.after_key))
        if form.after_type:
            other = form.types[1] or next(iter(sorted(kinds)), "")
            head = joined(head, quoted(form.types[0] if is_text else other), self._wire(form.after_type))
        texts = choices(found)
        if texts is not None:
            return joined(head, one_of(texts), self._wire(form.end))
        if not is_text:
            return joined(head, self._rules.json(found, tool), self._wire(form.end))
        return joined(head, self._rules.free_text(found, key, tool, form.end))

    def _bare_fields(self, form: BareKeys, schema: Mapping[str, Any], tool: Tool, deep: int) -> str:
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        return self._rules.series(
            [
                (f"{quoted(f'{key}:')} {self._bare(form, each, key, tool, deep - 1)}", key in required)
                for key, each in properties.items()
            ],
            ",",
        )

    def _bare(self, form: BareKeys, schema: Any, key: str, tool: Tool, deep: int) -> str:
        found = at(schema, tool)
        kinds, texts = types_of(found, tool.parameters), choices(found)
        if texts is not None:
            return joined(self._wire(form.quote), one_of(texts), self._wire(form.quote))
        if kinds == {"string"}:
            return joined(self._wire(form.quote), self._rules.free_text(found, key, tool, form.quote))
        if kinds == {"object"} and deep:
            return f"{quoted('{')} {self._bare_fields(form, found, tool, deep)} {quoted('}')}"
        if kinds == {"array"} and deep and "items" in found:
            each = self._rules.named(self._bare(form, found["items"], key, tool, deep - 1), "item")
            return f'"[" ({each} ("," {each})*)? "]"'
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return self._rules.json(found, tool)
        raise RequestError(
            "tools: this model's own form of arguments cannot be held to this schema",
            where=f"{tool.name}.parameters.{key}",
            got=json.dumps(found, default=str)[:150],
            hint="give each value one type",
        )
