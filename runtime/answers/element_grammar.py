"""A tool → the rules of its arguments as elements. What has no form in elements is written as JSON inside one.

fields of an object      mark <key> value mark </key>, in the order of the schema
values of a list         mark <item> value mark </item>
text                     as it is, without the mark
objects without fields   JSON
"""

from collections.abc import Mapping
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.answers.arguments import types_of
from ingot.runtime.answers.grammar_rules import DEEPEST, PLAIN_KEYS, GrammarRules, at, choices, fields, joined, one_of
from ingot.runtime.answers.tools import Tool
from ingot.runtime.answers.wire_format import Elements
from ingot.runtime.guided.grammars import quoted

_OBJECT_KEYS = {*PLAIN_KEYS, "properties", "required", "additionalProperties"} - {"anyOf", "oneOf"}
_LIST_KEYS = {*PLAIN_KEYS, "items", "minItems", "maxItems"} - {"anyOf", "oneOf"}
_MOST_ITEMS = 256  # that a schema may count


class ElementGrammar:
    """The rules of one tool."""

    def __init__(self, rules: GrammarRules, form: Elements, tool: Tool) -> None:
        self._rules, self._form, self._tool = rules, form, tool
        self._referred: dict[tuple[str, str], str] = {}  # (what is referred to, the end behind it) → a rule

    def arguments(self) -> str:
        """All of them. Raises RequestError."""
        for key, _ in fields(self._tool.parameters):
            if not _is_name(key):
                raise RequestError(
                    "tools: this model writes the name of an argument as a tag, and this name cannot be one",
                    where=f"{self._tool.name}.parameters.properties",
                    got=repr(key)[:100],
                    hint="leave <, >, line breaks and a / at the beginning out of the name",
                )
        return self._fields(self._tool.parameters, DEEPEST, "")

    def _fields(self, schema: Mapping[str, Any], deep: int, where: str) -> str:
        required = set(schema.get("required") or ())
        parts = [(self._element(key, each, deep, f"{where}{key}"), key in required) for key, each in fields(schema)]
        return self._rules.series(parts, "")

    def _element(self, name: str, schema: Any, deep: int, where: str) -> str:
        return joined(self._tag(f"<{name}>"), self._value(schema, f"</{name}>", deep, where))

    def _tag(self, text: str) -> str:
        """Mark and tag: one lexeme, where the mark is letters, since all tags begin with it."""
        mark = self._rules.wire(self._form.mark)
        return joined(mark, quoted(text)) if mark.startswith("<[") else quoted(self._form.mark + text)

    def _value(self, schema: Any, end: str, deep: int, where: str) -> str:
        """What stands between two tags, and the second. end: its letters."""
        if not isinstance(schema, Mapping):
            return self._json(schema, end)
        reference = schema.get("$ref")
        if isinstance(reference, str) and schema.keys() <= {*PLAIN_KEYS, "$ref"}:
            return self._reference(reference, end, deep, where)
        texts = choices(schema)
        if texts is not None:
            return joined(one_of(texts), self._tag(end))
        kinds = types_of(schema, self._tool.parameters)
        branches = schema.get("anyOf", schema.get("oneOf"))
        if "string" in kinds or (not kinds and not schema.keys() - PLAIN_KEYS):
            return joined(self._rules.free_text(schema, where, self._tool, self._form.mark), quoted(end))
        if not deep:
            return self._json(schema, end)
        if isinstance(branches, list) and not schema.keys() - PLAIN_KEYS and self._differ(branches):
            each = [self._value(branch, end, deep - 1, where) for branch in branches]
            return f"({' | '.join(each)})"
        if kinds == {"object"} and self._has_fields(schema):
            return joined(self._fields(schema, deep - 1, f"{where}."), self._tag(end))
        if kinds == {"array"} and isinstance(schema.get("items"), Mapping) and not schema.keys() - _LIST_KEYS:
            return self._items(schema, end, deep - 1, where)
        return self._json(schema, end)

    def _reference(self, reference: str, end: str, deep: int, where: str) -> str:
        """One rule for all that refer to a schema, which may be itself."""
        found = at({"$ref": reference}, self._tool)
        if not found or "$ref" in found:  # there is nothing, or a circle
            return self._json({"$ref": reference}, end)
        if (reference, end) not in self._referred:
            name = self._referred[reference, end] = self._rules.new_name("value")
            self._rules.rule(name, self._value(found, end, deep, where))
        return self._referred[reference, end]

    def _differ(self, branches: list[Any]) -> bool:
        """Whether no value is one of two branches."""
        kinds = [types_of(each, self._tool.parameters) for each in branches]
        together = frozenset().union(*kinds)
        return all(kinds) and len(together) == sum(map(len, kinds)) and not together >= {"integer", "number"}

    def _has_fields(self, schema: Mapping[str, Any]) -> bool:
        names = [name for name, _ in fields(schema)]
        required = schema.get("required") or ()
        return (
            bool(names)
            and not schema.keys() - _OBJECT_KEYS
            and all(map(_is_name, names))
            and isinstance(required, list | tuple)
            and set(required) <= set(names)
        )

    def _items(self, schema: Mapping[str, Any], end: str, deep: int, where: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        counts = [each for each in (least, most) if each is not None]
        if not all(isinstance(each, int) and 0 <= each <= _MOST_ITEMS for each in counts):
            return self._json(schema, end)
        item = self._rules.named(self._element(self._form.item, schema["items"], deep, where), "item")
        count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
        return joined(f"{item}{count}", self._tag(end))

    def _json(self, schema: Any, end: str) -> str:
        return joined(self._rules.json(schema, self._tool), self._tag(end))


def _is_name(name: str) -> bool:
    return bool(name.strip()) and not name.startswith("/") and not set(name) & set("<>\n") and name == name.strip()
