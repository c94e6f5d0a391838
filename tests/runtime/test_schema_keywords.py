"""Keywords of JSON Schema: each is enforced or refused in words, none is accepted and left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided.guides import Guides
from ingot.runtime.guided.matcher import GrammarCache
from tests.runtime.byte_tokenizer import whole_byte_tokenizer
from tests.runtime.hostile import FORMS

END = 256

Case = tuple[dict[str, Any], list[Any], list[Any]]
CASES: dict[str, Case] = {
    "type": ({"type": "integer"}, [0, -3, 12], ["a", 1.5, None, True]),
    "types": ({"type": ["string", "null"]}, ["a", None], [1, []]),
    "no type": ({}, [1, "a", [{}], {"a": None}], []),
    "enum": ({"enum": [1, "a", None, {"b": [2]}]}, [1, "a", None, {"b": [2]}], [2, "b", {}, {"b": [3]}]),
    "const": ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, 1]),
    "minimum": ({"type": "integer", "minimum": -3}, [-3, 0, 1000], [-4, -100]),
    "maximum": ({"type": "number", "maximum": 2.5}, [2.5, -9, 0.1], [2.6, 30]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, [6, 70], [5, 0, -6]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, [4, -70], [5, 6, 50]),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, [0, 5, 35], [1, 7, 36]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab", "éà", "abc"], ["", "a", "é"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "ab", "é😀"], ["abc", "éàü"]),
    "pattern": ({"type": "string", "pattern": "^a[0-9]+$"}, ["a1", "a12"], ["a", "b1", "a1x"]),
    "pattern in the middle": ({"type": "string", "pattern": "b"}, ["abc", "b"], ["ac", ""]),
    "pattern of spaces": (
        {"type": "string", "pattern": r"^\s[\sx]\S[^\s]$"},
        [" \u3000ab", "\u00a0xé😀"],
        ["\ufeff ab", "\u0085 ab", " \u0085ab", "  \ufeffb", "  \u0085b", "  a\ufeff", "  a\u0085", "   b", "xxab"],
    ),
    "pattern of no spaces": (
        {"type": "string", "pattern": r"^[^\S][^\Sx][\S\n]\\s$"},
        ["  a\\s", "\u2003 \n\\s"],
        ["\ufeff a\\s", "\u0085 a\\s", "  \ufeff\\s", " xa\\s", "  a "],
    ),
    "patternProperties of spaces": (
        {"type": "object", "patternProperties": {r"^\S$": {"type": "integer"}}, "additionalProperties": False},
        [{"a": 1}],
        [{"\ufeff": 1}, {"\u0085": 1}, {" ": 1}, {"a": "x"}],
    ),
    "format date": (
        {"type": "string", "format": "date"},
        ["2026-11-25", "2024-02-29", "2000-02-29", "2026-01-31"],
        ["2026-13-01", "x", "2026-1-1", "2026-02-29", "1900-02-29", "2026-04-31", "2026-01-00"],
    ),
    "format time": (
        {"type": "string", "format": "time"},
        ["23:59:59Z", "00:00:00.25+20:23", "23:59:60Z"],
        ["24:00:00Z", "12:00:60Z", "22:59:60Z", "23:59:60+01:00", "12:00:00", "12:60:00Z"],
    ),
    "format date-time": (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T12:00:00Z"],
        ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z", "1998-12-31T23:58:60Z", "2024-02-29"],
    ),
    "format hostname": (
        {"type": "string", "format": "hostname"},
        ["a", "a-b.example.com", "x--a.example", "a1", "a" * 63],
        ["", "-a", "a-", "a..b", "xn--X", "ab--c", "a" * 64, ".".join(["a" * 50] * 6), "a_b"],
    ),
    "format beside pattern": (
        {"type": "array", "items": {"format": "date", "pattern": "^2024"}},
        [["2024-02-29", 3]],
        [["2024-02-30"], ["2023-01-01"]],
    ),
    "format uuid": (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567", "123e4567-e89b-12d3-a456-42661417400g"],
    ),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256", "10.0.0"]),
    "format unknown": ({"type": "string", "format": "colour"}, ["red"], []),
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, "a"]]),
    "minItems": ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2]], [[], [1]]),
    "maxItems": ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [[], [1]], [[1, 2]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        [[1, "a"]],
        [["a", 1], [1, "a", 2], [1]],
    ),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [[1]], [[2]]),
    "minContains": ({"type": "array", "contains": {"const": 1}, "minContains": 2}, [[1, 1]], [[1]]),
    "unevaluatedItems": ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    "properties": ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}], [{"a": "x"}]),
    "required": ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        [{"a": "x", "b": 1}],
        [{"b": "x"}],
    ),
    "no additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        [{}, {"a": []}],
        [{"b": 1}, {"a": 1, "b": 1}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        [{"n1": 1}],
        [{"n1": "x"}, {"b": 1}],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}]),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        [{"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, [{}], [{"a": 1}]),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, [1, "a"], ["b", None]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    "oneOf that overlaps": ({"oneOf": [{"minimum": 1, "type": "integer"}, {"const": 2}]}, [1], [2]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, "a"]),
    "not": ({"not": {"type": "integer"}}, ["a"], [1]),
    "if": ({"if": {"const": 1}, "then": {"const": 1}, "else": {"type": "string"}}, [1, "a"], [2]),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["a"]),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}}, [1], ["a"]),
    "$ref to itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"a": {"a": {}}}],
        [{"a": 1}, {"a": {"b": 1}}],
    ),
    "$ref beside others": ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}, [3], [4, "a"]),
    "$ref elsewhere": ({"$ref": "https://example.com/schema"}, [], [1]),
    "$anchor": ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "integer"}}}, [1], ["a"]),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "type": "null"}}}, [None], [1]),
    "false": ({"type": "object", "properties": {"a": False}}, [{}], [{"a": 1}]),
    "contradiction": ({"type": "integer", "minimum": 5, "maximum": 3}, [], [4]),
    "nullable": ({"type": "string", "nullable": True}, ["a"], [1]),
    "notes": ({"type": "null", "title": "t", "description": "d", "default": 1, "x-own": 2}, [None], [1]),
}


class Bytes(Guides):
    """With a tokenizer of bytes."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = whole_byte_tokenizer(folder, [])
        super().__init__(folder, {END})

    def takes(self, schema: dict[str, Any], instance: Any) -> bool:
        """Whether an answer may be this instance."""
        matcher = self.matcher(StructuredOutputs(json=schema))
        for token in [*self.tokenizer.encode(json.dumps(instance, ensure_ascii=False)), END]:
            if not matcher.allowed()[token // 32] >> token % 32 & 1:
                return False
            matcher.consume(token)
        return True


REFUSED = {
    "format unknown",
    "uniqueItems",
    "contains",
    "minContains",
    "unevaluatedItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "oneOf that overlaps",
    "not",
    "if",
    "$ref elsewhere",
    "$dynamicRef",
    "contradiction",
}
"""What the library may refuse: all else it enforces."""


@pytest.fixture(scope="module")
def guides(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    pytest.importorskip("llguidance", reason="needs llguidance")
    return Bytes(tmp_path_factory.mktemp("bytes"))


def test_a_reference_with_two_meanings_is_refused(guides: Bytes) -> None:
    """By draft 7 the $id has no effect beside a $ref, by later ones it moves it."""
    places = {"$id": "http://a/b/", "definitions": {"x": {"$id": "http://a/x", "type": "string"}}}
    for name in ("$id", "id"):
        schema = {**places, "allOf": [{name: "http://a/", "$ref": "x"}]}
        with pytest.raises(RequestError, match="two meanings") as caught:
            guides.matcher(StructuredOutputs(json=schema))
        assert caught.value.where == "schema $.allOf[0]"
    guides.matcher(StructuredOutputs(json={"$id": "http://a/b", "$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}))


@pytest.mark.parametrize("name", CASES)
def test_a_keyword_is_enforced_or_refused(guides: Bytes, name: str) -> None:
    refused: RequestError | None = None
    schema, valid, invalid = CASES[name]
    try:
        guides.matcher(StructuredOutputs(json=schema))
    except RequestError as caught:
        refused = caught
    if refused is not None:
        assert name in REFUSED, refused
        assert refused.got, "in the library's words"
        assert str(refused.where).startswith("schema $"), "with the path"
        return
    assert [each for each in valid if not guides.takes(schema, each)] == []
    assert [each for each in invalid if guides.takes(schema, each)] == []
    inside = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    if "#" not in json.dumps(schema):
        assert [each for each in invalid if guides.takes(inside, {"v": each})] == []


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", FORMS)
def test_a_hostile_form_is_refused_or_has_limits(guides: Bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal tries few parts of it, and a grammar costs a step no more than a failed sequence."""
    tried, problem = list[str](), GrammarCache.problem

    def counted(cache: GrammarCache, kind: str, text: str) -> str | None:
        tried.append(text)
        return problem(cache, kind, text)

    monkeypatch.setattr(GrammarCache, "problem", counted)
    matcher, refused = None, ""
    try:
        matcher = guides.matcher(StructuredOutputs(**FORMS[name]))
    except RequestError as caught:
        refused = str(caught)
    assert len(refused) < 3000
    assert len(tried) <= 65
    if matcher is None:
        return
    for _ in range(50):
        mask = matcher.allowed()
        tokens = [token for token in range(END) if mask[token // 32] >> token % 32 & 1]
        if not tokens or matcher.consume(tokens[-1]):
            break
