"""Forms of answers that cost as much as they can: large, deep, of many alternatives, referring to themselves."""

from typing import Any

_CELL = {"type": "integer"}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = _CELL
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _doubling(count: int) -> dict[str, Any]:
    """Each definition refers twice to the next."""
    named = {f"n{n}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/n{n + 1}"}] * 2} for n in range(count)}
    return {"$ref": "#/$defs/n0", "$defs": {**named, f"n{count}": {"type": "null"}}}


def _choices(n: int, width: int) -> dict[str, Any]:
    """Objects of which each demands another property."""
    return {"anyOf": [{"type": "object", "properties": {f"p{n}_{m}": _CELL}} for m in range(width)]}


def _either(n: int) -> list[dict[str, Any]]:
    return [{"properties": {"a": {"pattern": f"{letter}{n}"}}} for letter in "xy"]


_WORDS = "".join(chr(97 + n * n * 7 % 26) for n in range(16_000))


def _deep(schema: dict[str, Any]) -> dict[str, Any]:
    """Behind a number, so that it is not there when an answer begins."""
    return {"type": "array", "prefixItems": [{"type": "integer", "minimum": 1000}, schema], "minItems": 2}


SCHEMAS: dict[str, dict[str, Any]] = {
    "deep": _nested(150),
    "deeper": _nested(3000),
    "wide": {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "a{1,9}b"} for n in range(1000)}},
    "many choices": {"enum": [f"choice {n} \u2603" for n in range(20_000)]},
    "many objects": {"anyOf": [{"type": "object", "properties": {f"p{n}": _CELL}} for n in range(1000)]},
    "products of choices": {"allOf": [_choices(n, 12) for n in range(8)]},
    "products of patterns": {"type": "object", "allOf": [{"anyOf": _either(n)} for n in range(20)]},
    "repeated": {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}"},
    "doubling": {"type": "string", "pattern": "(a|b)*a(a|b){40}"},
    "words in any order": {"type": "string", "pattern": "|".join(f"(.*w{n}.*v{n}.*)" for n in range(40))},
    "both ends": {"type": "string", "pattern": "^(.?){200}x{200}$"},
    "long numbers": {"type": "number", "minimum": 1e-300, "maximum": 1.7e308, "multipleOf": 1e-9},
    "many items": {"type": "array", "items": {"type": "array", "items": _CELL, "minItems": 999}, "minItems": 99_999},
    "long lengths": {"type": "string", "minLength": 99_999, "maxLength": 999_999},
    "a cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a cycle of choices": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
    "a tree of itself": {
        "type": "object",
        "properties": {
            f"p{n}": {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]} for n in range(60)
        },
    },
    "references that double": _doubling(40),
    "refused at the end": {
        "type": "object",
        "properties": {**{f"p{n}": {"$ref": "#/$defs/a"} for n in range(4000)}, "z": {"not": _CELL}},
        "$defs": {"a": {"enum": [f"choice {n}" for n in range(4000)]}},
    },
    "long text": {"const": "\U0001f600" * 30_000},
    "long text deep inside": _deep({"const": _WORDS}),
    "long choices deep inside": _deep({"enum": [f"{_WORDS}{n}" for n in range(20)]}),
    "long pattern deep inside": _deep({"type": "string", "pattern": "^(ab{99}c){400}$"}),
    "many keys deep inside": _deep({"required": [f"key {n} {_WORDS[:200]}" for n in range(200)]}),
    "odd names": {"type": "object", "properties": {"\u0000": {}, "\ud800": {}, "\u202e": {}}},
}
"""Name → schema."""

FORMS: dict[str, dict[str, Any]] = {
    **{name: {"json": schema} for name, schema in SCHEMAS.items()},
    "a regex that doubles": {"regex": "(a|b)*a(a|b){60}"},
    "a regex that repeats": {"regex": "((([a-z]{1,50} ){1,50}){1,50}\n){1,50}"},
    "a choice of all": {"choice": [f"{n:04d} choice" for n in range(4000)]},
    "a regex that repeats one text": {"regex": "[0-9]{4}(abcdefgh){6000}"},
    "a long choice of two": {"choice": [f"{n} {_WORDS}" for n in "ab"]},
    "long texts behind each other": {
        "grammar": f'start: /[0-9]{{4}}/ a{{100}}\na: "{_WORDS[:9000]}" "{_WORDS[9000:]}"'
    },
    "texts that double": {
        "grammar": "start: /[0-9]{4}/ r0\n"
        + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(20))
        + f'\nr20: "{_WORDS[:1000]}"'
    },
    "ends that pile up": {"grammar": f'start: a\na: /[0-9]/ a "{_WORDS[:1000]}" | "x"'},
    "sums of sums": {"grammar": 'start: start start | "a" | "b" | start "c" start'},
    "no end": {"grammar": "start: a\na: b a | a b\nb: start"},
    "rules that multiply": {
        "grammar": "root ::= r0\n"
        + "\n".join(f"r{n} ::= r{n + 1} r{n + 1} | r{n + 1}" for n in range(60))
        + '\nr60 ::= "a"?'
    },
    "lexemes that overlap": {
        "grammar": "start: ("
        + " | ".join(f"L{n}" for n in range(200))
        + ")*\n"
        + "\n".join(f"L{n}: /[a-z]+{n}[a-z ]*/" for n in range(200))
    },
}
"""Name → fields of StructuredOutputs."""
