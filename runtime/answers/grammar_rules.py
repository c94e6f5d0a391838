"""The rules of a grammar in Lark, as they are written: what all forms of arguments need of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.answers.tools import Tool
from ingot.runtime.guided.grammars import TEXT, quoted, schema_text, text_as_regex
from ingot.runtime.json_pointer import moved, resolved

PLAIN_KEYS = {"type", "description", "title", "default", "examples", "deprecated", "anyOf", "oneOf", "nullable"}
DEEPEST = 16  # values within values
_ROOT = "parameters"


class GrammarRules:
    """Rules, one a line. wire: text → how Lark spells it, with control tokens for what they read like."""

    def __init__(self, wire: Callable[[str], str]) -> None:
        self.wire = wire
        self.lines: list[str] = []
        self._names = 0

    def rule(self, name: str, body: str) -> str:
        """One more; returns its name."""
        self.lines.append(f"{name}: {body}")
        return name.removesuffix("[lazy]")

    def new_name(self, kind: str) -> str:
        """A name that no rule has."""
        self._names += 1
        return f"{kind}_{self._names}"

    def named(self, body: str, kind: str, *, lazy: bool = False) -> str:
        """A rule with a name of its own."""
        return self.rule(f"{self.new_name(kind)}{'[lazy]' if lazy else ''}", body)

    def until(self, end: str) -> str:
        """Any text, and then this one."""
        parts = self.wire(end)
        if parts.startswith("<["):
            return f"{TEXT} {parts}"
        head, _, rest = parts.partition(" <[")
        text = text_as_regex(json.loads(head))
        if rest:
            return f"{self.named(f'{TEXT[:-1]}{text}/', 'text')} <[{rest}"
        return self.named(f"{TEXT[:-1]}{text}/", "text", lazy=True)

    def json(self, schema: Any, tool: Tool | None = None) -> str:
        """A value as JSON. tool: whose definitions the schema refers to."""
        return self.named(f"%json {schema_text(_with_root(schema, tool))}", "json")

    def series(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """(what, whether it must be there), with a separator between those that are there."""
        first, rest = '""', '""'  # of the parts from a place on: as the first ones, and behind others
        for body, needed in reversed(parts):
            part = self.named(body, "part")
            behind = joined(quoted(separator) if separator else "", part)
            first, rest = (
                self.named(f"{part} {rest}" if needed else f"{part} {rest} | {first}", "first"),
                self.named(f"{behind} {rest}" if needed else f"({behind})? {rest}", "rest"),
            )
        return first

    def free_text(self, schema: Mapping[str, Any], key: str, tool: Tool, end: str) -> str:
        """A string that is written as it is, and its end. Raises RequestError for what is not enforced there."""
        unions = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
        for each in (schema, *unions):
            beyond = each.keys() - PLAIN_KEYS if isinstance(each, Mapping) else {"a schema"}
            if beyond:
                raise RequestError(
                    "tools: this model writes strings without quotes, and there this is not enforced",
                    where=f"{tool.name}.parameters.properties.{key}",
                    got=", ".join(sorted(beyond))[:100],
                    hint="leave it out, or let the tool check it",
                )
        return self.until(end)


def fields(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and schemas of the fields of an object."""
    found = schema.get("properties")
    return list(found.items()) if isinstance(found, Mapping) else []


def at(schema: Any, tool: Tool) -> dict[str, Any]:
    """A schema itself, where it refers to another one."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = resolved(schema["$ref"], tool.parameters)
    return dict(schema) if isinstance(schema, Mapping) else {}


def choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a value may have, where it must be one of some."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values and all(isinstance(each, str) for each in values) else None


def one_of(texts: Sequence[str]) -> str:
    """One of these texts."""
    return f"({' | '.join(map(quoted, texts))})"


def _with_root(schema: Any, tool: Tool | None) -> Any:
    """A part of a tool's parameters, with all of these where its references find them."""
    if tool is None or not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
        return schema
    place = f"/$defs/{_ROOT}"
    return {**moved(schema, place), "$defs": {_ROOT: moved(tool.parameters, place)}}


def joined(*parts: str) -> str:
    """One behind the other."""
    return " ".join(filter(None, parts))
