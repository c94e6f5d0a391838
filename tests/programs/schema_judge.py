"""Schemas of every keyword and type, and texts that a validator judges: what a grammar takes has to be valid.

python -m tests.programs.schema_judge [--rounds 3] [--seed 0]

Each round makes a schema of every pair of keywords of a type, with and without the type itself, and of every way to
combine schemas. The package jsonschema judges texts that lie at the bounds, in several spellings. Ends with an error if
a grammar takes a text that is not valid. Prints for each group what was refused in words, and valid texts that are not
taken.
"""

import argparse
import dataclasses
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided.guides import Guides
from tests.runtime.byte_tokenizer import whole_byte_tokenizer

END = 256
Schema = dict[str, Any]
FORMATS = ("date", "ipv4", "ipv6", "uuid")  # those that jsonschema judges by itself
_WORDS = (
    "",
    "a",
    "b",
    "ab",
    "aab",
    "b7",
    "éé",
    "a\nb",
    "x" * 6,
    "a\0b",
    "\U0001f600",
    'q"\\',
    "2026-02-30",
    "2026-11-25",
)
_PLACES = ("10.0.0.1", "10.0.0.256", "::1", "1::2::3", "123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b")
_NUMBERS = (0, 1, -1, 2, 3, 4, 5, 6, 7, 10, -7, 99, 0.5, 2.5, -2.5, 3.75, 1e3, 12345678901)
_PATTERNS = ("^a", "b$", "^[ab]+$", "[0-9]", "^.{2,3}$", "a|^b7$", "^(a|b)b?$")
_KEYS = ("a", "b", "c1", "zz")


def _plain(draw: random.Random) -> Schema:
    """A small one."""
    return dict(draw.choice(_SMALL))


_SMALL: tuple[Schema, ...] = (
    {"type": "integer"},
    {"type": "string"},
    {"type": "string", "maxLength": 2},
    {"type": "boolean"},
    {"type": "null"},
    {"const": "a"},
    {"enum": [1, "b", None]},
    {"type": "number", "minimum": 3},
    {"type": "array", "items": {"type": "integer"}},
    {},
)
_OF_NUMBERS: dict[str, Callable[[random.Random], Any]] = {
    "minimum": lambda draw: draw.choice((-7, 0, 2, 2.5, 5)),
    "maximum": lambda draw: draw.choice((-2.5, 0, 4, 7, 99)),
    "exclusiveMinimum": lambda draw: draw.choice((-7, 0, 2.5, 3)),
    "exclusiveMaximum": lambda draw: draw.choice((0, 2.5, 5, 100)),
    "multipleOf": lambda draw: draw.choice((1, 2, 3, 0.5, 0.25)),
    "enum": lambda draw: draw.sample(_NUMBERS, 3),
    "const": lambda draw: draw.choice(_NUMBERS),
}
KEYWORDS: dict[str, dict[str, Callable[[random.Random], Any]]] = {
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "string": {
        "minLength": lambda draw: draw.randrange(4),
        "maxLength": lambda draw: draw.randrange(5),
        "pattern": lambda draw: draw.choice(_PATTERNS),
        "format": lambda draw: draw.choice(FORMATS),
        "enum": lambda draw: draw.sample(_WORDS, 3),
        "const": lambda draw: draw.choice(_WORDS),
    },
    "array": {
        "items": _plain,
        "prefixItems": lambda draw: [_plain(draw) for _ in range(draw.randrange(1, 3))],
        "minItems": lambda draw: draw.randrange(3),
        "maxItems": lambda draw: draw.randrange(4),
        "uniqueItems": lambda draw: True,
        "contains": _plain,
        "minContains": lambda draw: draw.randrange(3),
        "maxContains": lambda draw: draw.randrange(1, 3),
        "unevaluatedItems": lambda draw: False,
        "enum": lambda draw: [[1], ["a", None], []],
    },
    "object": {
        "properties": lambda draw: {key: _plain(draw) for key in draw.sample(_KEYS, 2)},
        "required": lambda draw: draw.sample(_KEYS, draw.randrange(1, 3)),
        "additionalProperties": lambda draw: draw.choice((False, True, {"type": "integer"}, {"type": "string"})),
        "patternProperties": lambda draw: {draw.choice(("^a", "[0-9]$", "z")): _plain(draw)},
        "propertyNames": lambda draw: {"maxLength": draw.randrange(1, 3)},
        "minProperties": lambda draw: draw.randrange(3),
        "maxProperties": lambda draw: draw.randrange(3),
        "dependentRequired": lambda draw: {"a": ["b"]},
        "dependentSchemas": lambda draw: {"a": {"required": ["c1"]}},
        "unevaluatedProperties": lambda draw: False,
        "const": lambda draw: {"a": 1},
    },
}
"""Type → keyword → a value of it."""


def _combined(draw: random.Random) -> Iterator[tuple[str, Schema]]:
    """(group, schema)"""
    one, two, three = (_plain(draw) for _ in range(3))
    for name in ("anyOf", "oneOf", "allOf"):
        yield name, {name: [one, two]}
        yield name, {"type": draw.choice(("integer", "string")), name: [two, three]}
        yield name, {name: [{"type": "object", "required": [key]} for key in draw.sample(_KEYS, 2)]}
    yield "not", {"not": one}
    yield "not", {"type": "integer", "not": {"const": 3}}
    yield "if", {"if": one, "then": two, "else": three}
    yield "$ref", {"$ref": "#/$defs/x", "$defs": {"x": one}}
    yield "$ref", {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": two}}
    yield "$ref", {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}}}
    yield "$ref", {"$ref": "#/$defs/x", "maximum": 4, "$defs": {"x": {"type": "integer"}}}
    yield "type", {"type": draw.sample(("integer", "string", "null", "boolean", "array", "object"), 2)}
    yield "type", {"type": ["integer", "null"], "minimum": 2}
    yield "none", {"title": "a", "description": "b", "default": 3, "examples": [1], "x-own": {"not": {}}}
    yield "none", {}


def schemas(draw: random.Random) -> Iterator[tuple[str, Schema]]:
    """A round: (group, schema)."""
    for kind, keywords in KEYWORDS.items():
        for names in itertools.combinations(keywords, 2):
            schema = {name: keywords[name](draw) for name in names}
            yield kind, {"type": kind, **schema}
            if draw.random() < 0.3:
                yield f"{kind}, no type", schema
    yield from _combined(draw)


def texts(schema: Schema, draw: random.Random) -> Iterator[str]:
    """JSON to be judged: of its own type mostly, in several spellings."""
    kind = schema.get("type")
    known: dict[str, list[Any]] = {
        "string": [*_WORDS, *_PLACES],
        "number": [*_NUMBERS],
        "integer": [*_NUMBERS],
        "array": _arrays(),
        "object": _objects(),
    }
    others = [0, 2.5, "a", "", None, True, False, [], [1], {}, {"a": 1}]
    own = known[kind] if isinstance(kind, str) and kind in known else [*_arrays()[::3], *_objects()[::3], *_NUMBERS[:8]]
    for value in [*own, *others, *_named(schema)]:
        yield json.dumps(value, ensure_ascii=False)
    for value in draw.sample(own, min(len(own), 6)):
        yield _escaped(value)
    yield from ("1.0", "1e2", "-0", "3.10", "25e-1")
    if kind == "object" or kind is None:
        yield from ('{"a": 1, "a": "x"}', '{"a": "x", "a": 1}', '{"\\u0061": "x"}', '{"\\u0061": 1, "zz": 2}')


def _arrays() -> list[Any]:
    parts = (1, 2, "a", "abc", None, 3.5)
    found: list[Any] = [[], *([each] for each in parts), *([one, two] for one, two in itertools.permutations(parts, 2))]
    return [*found, [1, 1], [1, 2, 3], ["a", "a", "a"], [[1]], [1, "b", 1], [4, 4, 5, 6]]


def _objects() -> list[Any]:
    parts = (1, 5, "a", "abc", None)
    found: list[Any] = [{}, *({key: each} for key in _KEYS for each in parts)]
    found += [{one: 1, two: each} for one, two in itertools.combinations(_KEYS, 2) for each in (4, "b")]
    return [*found, {"a": {"a": {}}}, {"a": {"a": 1}}, {"b": 1, "a": "b"}, dict.fromkeys(_KEYS, 1), {"d": [1]}]


def _named(schema: Schema) -> Iterator[Any]:
    """Values that the schema itself names."""
    yield from schema.get("enum", ())
    if "const" in schema:
        yield schema["const"]
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in schema:
            yield from (schema[name], schema[name] - 1, schema[name] + 1)


def _escaped(value: Any) -> str:
    """With every character of texts as an escape."""
    if isinstance(value, str):
        data = value.encode("utf-16-be")
        return '"' + "".join(f"\\u{data[n]:02x}{data[n + 1]:02x}" for n in range(0, len(data), 2)) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(_escaped, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_escaped(key)}: {_escaped(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


@dataclasses.dataclass(kw_only=True)
class Found:
    """Of one group. refused: schemas. wrong: (schema, text), taken and not valid. missed: valid and not taken."""

    schemas: int = 0
    refused: int = 0
    taken: int = 0
    forbidden: int = 0
    wrong: list[tuple[Any, str]] = dataclasses.field(default_factory=list)
    missed: list[tuple[Any, str]] = dataclasses.field(default_factory=list)

    def counts(self) -> tuple[int, ...]:
        """Schemas, refused ones, texts taken, texts not valid, of these taken, valid and not taken."""
        return self.schemas, self.refused, self.taken, self.forbidden, len(self.wrong), len(self.missed)

    def add(self, other: "Found") -> None:
        """What another group found."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Judge:
    """Grammars of a tokenizer of bytes, and what they take."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer, self._guides = whole_byte_tokenizer(folder, []), Guides(folder, {END})
        self._checker = jsonschema.FormatChecker(formats=FORMATS)
        self.groups: dict[str, Found] = {}

    def round(self, seed: int) -> None:
        """Every schema of a round, and its texts."""
        draw = random.Random(seed)
        for group, schema in schemas(draw):
            self._judge(self.groups.setdefault(group, Found()), schema, draw)

    def _judge(self, found: Found, schema: Schema, draw: random.Random) -> None:
        validator = jsonschema.Draft202012Validator(schema, format_checker=self._checker)
        drawn = dict.fromkeys(texts(schema, draw))
        self.judge(found, schema, ((text, validator.is_valid(json.loads(text))) for text in drawn))

    def judge(self, found: Found, schema: Schema | bool, cases: Iterable[tuple[str, bool]]) -> None:
        """cases: (JSON, whether it is valid)."""
        found.schemas += 1
        try:
            matcher = self._guides.matcher(StructuredOutputs(json=schema))
        except RequestError as error:
            if not error.got or not str(error.where).startswith("schema $"):
                raise AssertionError(f"{schema} is refused without words or a path") from error
            found.refused += 1
            return
        for text, valid in cases:
            assert matcher.reset(), matcher.error
            takes = self._takes(matcher, text)
            found.taken += takes
            found.forbidden += not valid
            if takes and not valid:
                found.wrong.append((schema, text))
            elif valid and not takes:
                found.missed.append((schema, text))

    def _takes(self, matcher: Any, text: str) -> bool:
        tokens = [*self._tokenizer.encode(text), END]
        for place, token in enumerate(tokens):
            if not matcher.allowed()[token // 32] >> token % 32 & 1:
                return False
            if matcher.consume(token):
                return place >= len(tokens) - 2
        raise AssertionError("an answer ends with its end token")


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="so many valid texts of each group that are not taken")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="judge-") as folder:
        judge = Judge(Path(folder))
        for place in range(options.rounds):
            judge.round(options.seed + place)
    print("| group | schemas | refused | texts taken | not valid | of these taken | valid and not taken |")
    print("|---|---|---|---|---|---|---|")
    for group, found in judge.groups.items():
        print(f"| {group} | {' | '.join(map(str, found.counts()))} |")
    for group, found in judge.groups.items():
        for what, pairs in (("TAKEN", found.wrong), ("not taken", found.missed[: options.show])):
            for schema, text in pairs:
                print(f"{what}, {group}: {json.dumps(schema)} {text}")
    return 1 if any(found.wrong for found in judge.groups.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
