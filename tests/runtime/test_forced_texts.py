"""Texts that leave the model no choice: short ones are cut into the model's tokens, long ones written step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided import forced_texts
from ingot.runtime.guided.forced_texts import MOST_BYTES, released
from ingot.runtime.guided.grammars import make_grammar, schema_text
from ingot.runtime.guided.guides import Guides
from tests.runtime.byte_tokenizer import whole_byte_tokenizer
from tests.runtime.test_schema_keywords import CASES, END, REFUSED, Bytes

LONG = "ab" * 600
DOUBLED = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(12)) + '\nr12: "a"'


def _parts(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "prefixItems": [{"type": "integer"}, schema], "minItems": 2}


@pytest.mark.parametrize(
    ("asked", "long"),
    [
        ({"json": _parts({"const": LONG[:900]})}, False),
        ({"json": _parts({"const": LONG})}, True),
        ({"json": _parts({"enum": [1, LONG]})}, True),
        ({"json": _parts({"const": {"a": [LONG]}})}, True),
        ({"json": _parts({"type": "object", "required": [LONG]})}, True),
        ({"json": _parts({"type": "string", "pattern": "^(ab{9}){200}$"})}, True),
        ({"json": _parts({"type": "object", "properties": {f"key {n}": {} for n in range(200)}})}, False),
        ({"json": {"enum": [f"choice {n}" for n in range(900)]}}, False),
        ({"json": {"items": {"const": LONG[:90]}, "minItems": 20}, "disable_any_whitespace": True}, True),
        ({"json": {"items": {"const": LONG[:90]}, "minItems": 20}}, False),
        ({"json": {"properties": {"a": {"$ref": "#"}}}, "disable_any_whitespace": True}, True),
        ({"json": {"properties": {"a": {"const": 1}}}, "disable_any_whitespace": True}, False),
        ({"regex": "[0-9]+(x{40}y){3}"}, False),
        ({"regex": "[0-9]+(x{40}y){300}"}, True),
        ({"choice": [f"choice {n}" for n in range(900)]}, False),
        ({"choice": ["a", LONG]}, True),
        ({"grammar": 'start: "a" b{3}\nb: "c" | "d"'}, False),
        ({"grammar": f'start: /[0-9]/ "{LONG[:600]}" "{LONG[:600]}"'}, True),
        ({"grammar": f'start: ("{LONG[:600]}" | "{LONG[:600]}c")'}, False),
        ({"grammar": f'start: "x" | b\nb: "{LONG[:90]}"~30'}, True),
        ({"grammar": f"start: /[0-9]/ r0\n{DOUBLED}"}, True),
        ({"grammar": 'start: "(" start ")" | "x"'}, True),
        ({"grammar": f'root ::= [0-9] ("{LONG[:90]}"){{30}}'}, True),
        ({"grammar": "start: %json " + json.dumps({"const": LONG})}, True),
        ({"grammar": 'start: "a" <[7]> <s>'}, False),
        ({"grammar": 'start: "a" <[8]>'}, True),
        ({"grammar": 'start: "a" <[7-8]>'}, True),
        ({"grammar": 'start: "<[8]>" %json {"const": "<[8]>"}'}, False),
    ],
)
def test_what_can_get_long(asked: dict[str, Any], long: bool) -> None:
    pytest.importorskip("llguidance", reason="reads GBNF")
    kind, text = make_grammar(StructuredOutputs(**asked), str)
    assert ("no_forcing" in released(kind, text, {7})[1]) == long


def test_short_texts_are_cut_into_tokens_and_long_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    tokenizer = whole_byte_tokenizer(tmp_path, [])
    guides = Guides(tmp_path, {END})
    texts, call = list[bytes](), guides.cache.tokenizer._encode

    def watched(data: bytes) -> tuple[int, ...]:
        texts.append(data)
        return call(data)

    monkeypatch.setattr(guides.cache.tokenizer, "_ids", watched)
    for text, expected in ((LONG[:40], True), (LONG, False)):
        matcher = guides.matcher(StructuredOutputs(json=_parts({"const": text})))
        for token in tokenizer.encode('[1, "a'):
            assert matcher.allowed()[token // 32] >> token % 32 & 1
            matcher.consume(token)
        matcher.allowed()
        assert any(len(each) > 30 for each in texts) == expected
        texts.clear()


@pytest.fixture(scope="module")
def guides(tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    pytest.importorskip("llguidance", reason="needs llguidance")
    return Bytes(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED))
def test_a_grammar_that_is_written_step_by_step_is_the_same(
    guides: Bytes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced_texts, "_LOOKED_AHEAD", -1)
    schema, valid, invalid = CASES[name]
    assert [each for each in valid if not guides.takes(schema, each)] == []
    assert [each for each in invalid if guides.takes(schema, each)] == []


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("a/b", "a/b", "ab"),
        ("[/]\\/x", "//x", "/x"),
        ("a\nb", "a\nb", "ab"),
        ("(?i)q", "Q", "r"),
        ("\\\\/", "\\/", "/"),
    ],
)
def test_a_regular_expression_in_slashes_is_the_same(
    guides: Bytes, regex: str, good: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced_texts, "_LOOKED_AHEAD", -1)
    for text, expected in ((good, True), (bad, False)):
        matcher = guides.matcher(StructuredOutputs(regex=regex))
        taken = True
        for token in guides.tokenizer.encode(text):
            taken = taken and bool(matcher.allowed()[token // 32] >> token % 32 & 1)
            matcher.consume(token)
        assert taken == expected


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"json": {"properties": {"a": {"items": {"const": "x" * 17_000}}}}}, "schema $.properties.a.items.const"),
        ({"json": {"anyOf": [{}, {"enum": [1, ["é" * 8_200]]}]}}, "schema $.anyOf[1].enum"),
        ({"json": {"properties": {"x" * 17_000: {}}}}, "schema $.properties"),
        ({"json": {"pattern": "x" * 17_000}}, "schema $.pattern"),
        ({"json": {"patternProperties": {"x" * 17_000: {}}}}, "schema $.patternProperties"),
        ({"choice": ["a", "x" * 17_000]}, "structured_outputs.choice[1]"),
        ({"regex": "a|" + "x" * 17_000}, "structured_outputs.regex"),
        ({"grammar": f'start: "{"x" * 17_000}"'}, "structured_outputs.grammar"),
    ],
)
def test_a_text_that_is_too_long_is_refused_with_its_place(asked: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match="too long") as caught:
        make_grammar(StructuredOutputs(**asked), str)
    assert caught.value.where == place
    assert str(MOST_BYTES) in str(caught.value)


def test_a_text_of_the_longest_length_is_taken() -> None:
    assert schema_text({"const": "x" * MOST_BYTES})
