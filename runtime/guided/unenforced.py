"""Parts of JSON schemas that the library would accept and enforce as something else: refused, with their path."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.guided.forced_texts import refuse_long
from ingot.runtime.json_pointer import resolved

DEEPEST = 200  # schemas within schemas
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
MANY_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # those that have no short escape
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DIGITS = 15  # of a bound
_EXACT = 2**53  # whole numbers up to here are doubles
_LEAST, _MOST = -(2**63) + 1024, 2**64 - 1  # whole numbers of a value; the library ends the process at smaller ones
_EMBEDDED = re.compile(r"-\d{19,}")


def refuse_unenforced(schema: Mapping[str, Any]) -> None:
    """Raises RequestError, with the JSON path."""
    _refuse(schema, schema, "$", DEEPEST)


def _refuse(schema: Any, root: Mapping[str, Any], path: str, deep: int) -> None:
    if not isinstance(schema, Mapping) or deep == 0:
        return  # what is nested deeper is refused by the library
    _refuse_repeated_keys(schema, path)
    _refuse_bounds(schema, path)
    _refuse_circle(schema, root, path)
    _refuse_moved_reference(schema, path)
    for key in ("const", "enum", "required", "properties", "patternProperties", "pattern"):
        value = schema.get(key)
        if key in ("properties", "patternProperties") and isinstance(value, Mapping):
            value = list(value)  # its schemas are looked at below
        for text in _texts(value):
            refuse_long(text, f"schema {path}.{key}")
            if key in ("pattern", "patternProperties"):
                refuse_open_escape(text, f"schema {path}.{key}")
            if key not in ("pattern", "patternProperties") and _CONTROL.search(text):
                raise RequestError(
                    "structured_outputs: control characters that JSON writes as \\uXXXX alone cannot be enforced",
                    where=f"schema {path}.{key}",
                    got=json.dumps(text)[:100],
                    hint="leave the character out",
                )
    for key in ("const", "enum"):
        for number in _whole_numbers(schema.get(key)):
            refuse_number(number, f"schema {path}.{key}")
    for name, child in _subschemas(schema):
        _refuse(child, root, path + name, deep - 1)


def refuse_open_escape(regex: str, where: str) -> None:
    """A backslash at the end, which the library would leave out. Raises RequestError."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise RequestError(
            "structured_outputs: a regular expression ends with a backslash that escapes nothing",
            where=where,
            got=regex[-100:],
            hint="write two for a backslash, or leave it out",
        )


def refuse_number(number: int, where: str) -> None:
    """A whole number that the library cannot read. Raises RequestError."""
    if not _LEAST <= number <= _MOST:
        raise RequestError(
            "structured_outputs: a whole number is too large",
            where=where,
            expected=f"{_LEAST} to {_MOST}",
            got=str(number)[:100],
            hint="leave the value out, or make it a text",
        )


def refuse_numbers_in(grammar: str) -> None:
    """Schemas inside a grammar in Lark, whose numbers the library reads as those of schemas. Raises RequestError."""
    if "%json" in grammar:
        for found in _EMBEDDED.findall(grammar):
            refuse_number(int(found[:100]), "structured_outputs.grammar")


def _whole_numbers(value: Any) -> Iterator[int]:
    """All of them in a JSON value."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _whole_numbers(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _whole_numbers(each)


def _refuse_bounds(schema: Mapping[str, Any], path: str) -> None:
    """The library reads a bound as a double, and writes 15 of its digits."""
    for key in _BOUNDS:
        bound = schema.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        exact = abs(bound) <= _EXACT if isinstance(bound, int) else float(f"{bound:.{_DIGITS}g}") == bound
        if not exact:
            raise RequestError(
                f"structured_outputs: a bound of so many digits cannot be enforced: {key}",
                where=f"schema {path}",
                expected=f"at most {_DIGITS} digits, or a whole number up to {_EXACT}",
                got=repr(bound)[:100],
                hint="round the bound",
            )


def _refuse_circle(schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> None:
    """A reference to a reference, and so on, back to the first: no text is one of that."""
    seen: list[str] = []
    found: object = schema
    while isinstance(found, Mapping) and isinstance(found.get("$ref"), str):
        reference = str(found["$ref"])
        if reference in seen:
            raise RequestError(
                "structured_outputs: a $ref leads back to itself, so nothing says what is valid",
                where=f"schema {path}",
                got=" -> ".join([*seen, reference])[:200],
                hint="let it refer to a schema that says something",
            )
        seen.append(reference)
        found = resolved(reference, root) if reference.startswith("#") else None


def _refuse_moved_reference(schema: Mapping[str, Any], path: str) -> None:
    """Up to draft 7 nothing beside a $ref has an effect, its $id neither; the library resolves the one by the other."""
    reference, identifier = schema.get("$ref"), schema.get("$id", schema.get("id"))
    if isinstance(reference, str) and isinstance(identifier, str) and not reference.startswith("#"):
        raise RequestError(
            "structured_outputs: a relative $ref beside an $id has two meanings, one for each draft of JSON Schema",
            where=f"schema {path}",
            got=f"$ref {reference!r} beside $id {identifier!r}"[:200],
            hint="let it begin with #, or leave the $id out",
        )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from (str(key), *_texts(each))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _refuse_repeated_keys(schema: Mapping[str, Any], path: str) -> None:
    """Keys that a schema does not name may come twice in a text, and then count once."""
    least, named = schema.get("minProperties", 0), schema.get("required", ())
    count = len(set(map(str, named))) if isinstance(named, list) else 0
    if isinstance(least, int | float) and least > count + 1:
        raise RequestError(
            "structured_outputs: minProperties is enforced for one key at most that is not required",
            where=f"schema {path}",
            got=f"minProperties {least} and {count} required keys",
            hint="list more keys in required, or lower minProperties",
        )


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(how a path goes on, the schema there)"""
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            yield from ((f".{key}.{name}", each) for name, each in value.items())
        elif key in MANY_SCHEMAS and isinstance(value, list):
            yield from ((f".{key}[{place}]", each) for place, each in enumerate(value))
        elif key in ONE_SCHEMA:
            yield f".{key}", value
