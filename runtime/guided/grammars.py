"""StructuredOutputs → the grammar that the library is given: its kind, and its text."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ingot.configs.structured_outputs import StructuredOutputs, read_json
from ingot.errors import RequestError
from ingot.runtime.guided.chains import refuse_chain_of_schemas, refuse_chains_in_lark
from ingot.runtime.guided.forced_texts import WHITESPACE, refuse_long, refuse_long_in
from ingot.runtime.guided.string_formats import with_patterns
from ingot.runtime.guided.unenforced import (
    DEEPEST,
    MANY_SCHEMAS,
    ONE_SCHEMA,
    SCHEMAS_BY_NAME,
    refuse_numbers_in,
    refuse_open_escape,
    refuse_unenforced,
)

Grammar = tuple[str, str]
"""(kind, text): "json_schema", "regex" or "lark"."""

TEXT = r"/(.|\n)*/"
_ESCAPES = 'nrbtf\\"'  # without \uXXXX, by which a key could have another spelling than the one with a schema


def make_grammar(asked: StructuredOutputs, wire: Callable[[str], str]) -> Grammar:
    """wire: text → how Lark spells it, with control tokens for what they read like. Raises RequestError."""
    if asked.regex is not None:
        refuse_long_in("regex", asked.regex)
        refuse_open_escape(asked.regex, "structured_outputs.regex")
        return "regex", asked.regex
    if asked.choice is not None:
        for place, text in enumerate(asked.choice):
            refuse_long(text, f"structured_outputs.choice[{place}]")
        return "regex", choice_as_regex(asked.choice)
    if asked.grammar is not None:
        text = _from_gbnf(asked.grammar) if "::=" in asked.grammar else asked.grammar
        refuse_chains_in_lark(text, "structured_outputs.grammar")
        refuse_long_in("lark", text)
        refuse_numbers_in(text)
        return "lark", text
    if asked.structural_tag is not None:
        return "lark", _tags(read_json("structured_outputs.structural_tag", asked.structural_tag), wire)
    return "json_schema", schema_text(asked.schema, asked)


def schema_text(schema: Any, asked: StructuredOutputs | None = None) -> str:
    """As the library reads it. Raises RequestError."""
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError(
            "structured_outputs.json must be a JSON schema", expected="an object", got=repr(schema)[:100]
        )
    schema = {} if schema is True else {"not": {}} if schema is False else schema
    try:
        if asked is not None and asked.disable_additional_properties:
            schema = _closed(schema, DEEPEST)
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError("structured_outputs.json cannot be written as JSON", got=str(error)[:200]) from None
    refuse_chain_of_schemas(schema, "structured_outputs.json")
    refuse_unenforced(schema)
    schema = with_patterns(schema)
    options = dict(schema.get("x-guidance") or {}) if isinstance(schema.get("x-guidance"), Mapping) else {}
    _refuse_loose(options)
    options.setdefault("json_allowed_escapes", _ESCAPES)
    if asked is not None and asked.disable_any_whitespace:
        options = {**options, "whitespace_flexible": False}
    elif asked is not None and asked.whitespace_pattern is not None:
        options = {**options, "whitespace_pattern": asked.whitespace_pattern}
    elif not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        options = {**options, "whitespace_pattern": WHITESPACE}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _refuse_loose(options: Mapping[str, Any]) -> None:
    """Options of the library with which it would accept what it does not enforce."""
    escapes = options.get("json_allowed_escapes")
    loose = {"json_allowed_escapes": isinstance(escapes, str) and "u" in escapes}
    for name in ("lenient", "coerce_one_of", "json_allow_general_unicode_escapes", "json_allowed_escapes"):
        if loose.get(name, options.get(name)):
            raise RequestError(
                f"structured_outputs.json: x-guidance.{name} leaves parts of a schema without effect",
                hint="leave it out",
            )


def _closed(schema: Any, deep: int) -> Any:
    """The schema with additionalProperties false wherever it lists properties and does not say."""
    if deep == 0:
        raise RequestError("structured_outputs.json: schemas are nested too deep", expected=f"at most {DEEPEST}")
    if isinstance(schema, list):
        return [_closed(each, deep - 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _closed(each, deep - 1) for name, each in value.items()}
        elif key in (*MANY_SCHEMAS, *ONE_SCHEMA):
            found[key] = _closed(value, deep - 1)
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises nothing specific
        raise RequestError("structured_outputs.grammar is not GBNF", got=str(error)[:300]) from None


def _tags(document: Any, wire: Callable[[str], str]) -> str:
    """Text, and in it tags; a tag that has begun with its trigger is one of those that begin so."""
    structures, triggers = (document.get(name) if isinstance(document, Mapping) else None for name in _TAG_KEYS)
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise RequestError(
            "structured_outputs.structural_tag cannot be read",
            expected='{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}',
            got=repr(document)[:200],
        )
    rules = []
    for number, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            raise RequestError("structural_tag.triggers must be texts", got=repr(trigger)[:100])
        bodies = [
            f"{_rest(each['begin'], trigger, wire)} %json {schema_text(each.get('schema', {}))} {wire(each['end'])}"
            for each in map(_structure, structures)
            if each["begin"].startswith(trigger)
        ]
        if bodies:
            rules.append((number, trigger, bodies))
    used = sum(len(bodies) for _, _, bodies in rules)
    if used < len(structures):
        raise RequestError("structural_tag: every structure must begin with one of the triggers", got=f"{used} do")
    lines = [f"start: ({' | '.join(f'tag_{number}' for number, _, _ in rules)})* rest", f"rest: {TEXT}"]
    for number, trigger, bodies in rules:
        spelled = wire(trigger)
        if spelled.startswith("<["):
            lines.append(f"tag_{number}: {TEXT} {spelled} ({' | '.join(f'({body})' for body in bodies)})")
        else:
            lines.append(f"head_{number}[lazy]: {TEXT[:-1]}{text_as_regex(trigger)}/")
            lines.append(f"tag_{number}: head_{number} ({' | '.join(f'({body})' for body in bodies)})")
    return "\n".join(lines)


_TAG_KEYS = ("structures", "triggers")


def _structure(each: Any) -> Mapping[str, Any]:
    known = isinstance(each, Mapping) and all(isinstance(each.get(name), str) for name in ("begin", "end"))
    if not known or not each.keys() <= {"begin", "end", "schema"}:
        raise RequestError(
            "structural_tag: a structure cannot be read",
            expected='{"begin": text, "schema": a JSON schema, "end": text}',
            got=repr(each)[:200],
        )
    return dict(each)


def _rest(begin: str, trigger: str, wire: Callable[[str], str]) -> str:
    return wire(begin[len(trigger) :]) if len(begin) > len(trigger) else ""


def choice_as_regex(choice: Iterable[str]) -> str:
    """One lexeme: thousands of them would be more than a grammar may have at one place."""
    return "|".join(map(text_as_regex, choice))


def text_as_regex(text: str) -> str:
    """A text inside /.../."""
    return "".join(each if each.isalnum() or ord(each) > 127 else f"\\x{ord(each):02x}" for each in text)
