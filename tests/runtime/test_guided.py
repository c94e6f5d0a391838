"""What a request asks for becomes a grammar of the library, and what it does not enforce is refused with its place."""

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided import matcher
from ingot.runtime.guided.grammars import make_grammar, schema_text
from ingot.runtime.guided.guides import Guides, spell
from ingot.runtime.guided.library import Library
from tests.runtime.byte_tokenizer import byte_tokenizer

VOCAB = 110


@pytest.fixture
def guides(tmp_path: Path) -> Guides:
    pytest.importorskip("llguidance", reason="needs llguidance")
    byte_tokenizer(tmp_path, VOCAB)
    return Guides(tmp_path, {VOCAB - 1})


def ids(text: str) -> list[int]:
    return [ord(each) - ord("!") for each in text]


def takes(guides: Guides, text: str, **asked: Any) -> bool:
    """Whether the whole text is one of the grammar."""
    matcher = guides.matcher(StructuredOutputs(**asked))
    for token in ids(text):
        mask = matcher.allowed()
        if not mask[token // 32] >> token % 32 & 1:
            return False
        matcher.consume(token)
    mask, end = matcher.allowed(), VOCAB - 1
    return bool(mask[end // 32] >> end % 32 & 1)


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"regex": "[ab]{2}!"}, "ab!", "abc!"),
        ({"choice": ["yes", 'n"o']}, 'n"o', "no"),
        ({"grammar": 'root ::= "a" ("b" | "c")+'}, "abcb", "a"),
        ({"grammar": 'start: "a" /[0-9]/'}, "a7", "a"),
        ({"grammar": f'start: "a" <[{ids("b")[0]}]>'}, "ab", "a6"),
        ({"json_object": True}, '{"a":[1]}', "[1]"),
        ({"json": {"type": "integer", "maximum": 12}}, "12", "13"),
        (
            {"json": {"type": "object", "properties": {"a": {}}}, "disable_additional_properties": True},
            '{"a":1}',
            '{"b":1}',
        ),
    ],
)
def test_texts_of_the_form_alone_are_taken(guides: Guides, asked: dict[str, Any], good: str, bad: str) -> None:
    assert takes(guides, good, **asked)
    assert not takes(guides, bad, **asked)


def test_a_tag_that_has_begun_is_filled_as_its_schema_says(guides: Guides) -> None:
    structure = {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}
    asked = {"structural_tag": {"type": "structural_tag", "structures": [structure], "triggers": ["<f"]}}
    assert takes(guides, "text<f>12</f>more<f>3</f>", **asked)
    assert not takes(guides, "text<f>x", **asked)


def test_a_refusal_names_the_place(guides: Guides) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"not": {"type": "null"}}]}}}
    with pytest.raises(RequestError) as caught:
        guides.matcher(StructuredOutputs(json=schema))
    assert caught.value.where == "schema $.properties.a.anyOf[1]"
    assert "not" in str(caught.value.got)


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(["},
        {"regex": "a\\"},
        {"regex": "\\\\\\"},
        {"grammar": "start: other"},
        {"grammar": "root ::= ("},
        {"grammar": '{"type": "boolean"}'},
        {"grammar": "# nothing"},
    ],
)
def test_what_is_no_grammar_is_refused(guides: Guides, asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        guides.matcher(StructuredOutputs(**asked))


def test_matchers_of_one_grammar_move_by_themselves(guides: Guides) -> None:
    first, second = (guides.matcher(StructuredOutputs(regex="ab")) for _ in range(2))
    first.consume(ids("a")[0])
    assert (first.allowed() != second.allowed()).any()
    assert (first.clone().allowed() == first.allowed()).all()
    assert first.reset()
    assert (first.allowed() == second.allowed()).all()


@pytest.mark.slow
def test_what_the_library_made_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance")
    made, freed, call = set[str](), set[str](), Library.call
    handles: dict[int, str] = {}

    def counted(library: Library, name: str, *arguments: Any) -> Any:
        found = call(library, name, *arguments)
        if name in ("llg_new_tokenizer_v2", "llg_new_matcher", "llg_clone_matcher"):
            handles[found] = f"{name} {len(handles)}"
            made.add(handles[found])
        elif name in ("llg_free_tokenizer", "llg_free_matcher"):
            freed.add(handles.pop(arguments[0]))
        return found

    monkeypatch.setattr(Library, "call", counted)
    byte_tokenizer(tmp_path, VOCAB)
    guides = Guides(tmp_path, {VOCAB - 1})
    matcher = guides.matcher(StructuredOutputs(regex="ab"))
    del guides
    gc.collect()
    assert matcher.allowed().any(), "a grammar keeps its tokenizer"
    del matcher
    gc.collect()
    assert len(made) == 3, "a tokenizer, a grammar and its clone"
    assert freed == made


@pytest.mark.slow
def test_what_an_answer_leaves_serves_the_next(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning anew, unless it has failed; and nothing is kept of a grammar that is no longer used."""
    made, call = list[str](), Library.call

    def counted(library: Library, name: str, *arguments: Any) -> Any:
        made.extend([name] if name in ("llg_new_matcher", "llg_clone_matcher", "llg_free_matcher") else [])
        return call(library, name, *arguments)

    monkeypatch.setattr(Library, "call", counted)
    asked, beginning = StructuredOutputs(regex="ab"), guides.matcher(StructuredOutputs(regex="ab")).allowed()
    assert made == ["llg_new_matcher", "llg_clone_matcher"]
    for _ in range(3):
        used = guides.matcher(asked)
        assert (used.allowed() == beginning).all()
        used.consume(ids("a")[0])
        del used
    assert len(made) == 2
    used = guides.matcher(asked)
    used.consume(ids("x")[0])
    assert used.error is not None
    del used
    assert made[2:] == ["llg_free_matcher"]
    held = [guides.matcher(asked) for _ in range(matcher._MOST_IDLE + 3)]
    del held
    assert len(guides.cache) == matcher._MOST_IDLE
    monkeypatch.setattr(matcher, "_KEPT", 1)
    guides.matcher(StructuredOutputs(regex="abc"))
    gc.collect()
    made_now = made.count("llg_new_matcher") + made.count("llg_clone_matcher")
    assert made_now - made.count("llg_free_matcher") == 2, "the new one and its clone"


def test_control_tokens_are_spelled_as_tokens() -> None:
    assert spell('a<x>"b', {"<x>": 7, "<": 3}) == '"a" <[7]> "\\"b"'


def test_options_that_would_leave_parts_out_are_refused() -> None:
    with pytest.raises(RequestError, match="lenient"):
        schema_text({"type": "object", "x-guidance": {"lenient": True}})


def test_white_space_is_limited_unless_said_otherwise() -> None:
    def options(**others: Any) -> Any:
        return json.loads(make_grammar(StructuredOutputs(json_object=True, **others), str)[1])["x-guidance"]

    assert "{1,20}" in options()["whitespace_pattern"]
    tight = options(disable_any_whitespace=True)
    assert (tight["whitespace_flexible"], "whitespace_pattern" in tight) == (False, False)
    assert options(whitespace_pattern=" ")["whitespace_pattern"] == " "


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minProperties": 2}, "minProperties 2 and 0 required"),
        ({"minimum": 2**53 + 1}, "a bound of so many digits cannot be enforced: minimum"),
        ({"items": {"exclusiveMaximum": 987458.3711255031}}, "schema $.items"),
        ({"$ref": "#"}, "a $ref leads back to itself"),
        ({"const": -(2**63)}, "a whole number is too large"),
        ({"items": {"enum": [[-(2**63) + 1]]}}, "schema $.items.enum"),
        ({"const": 2**64}, "a whole number is too large"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}},
            "$.$defs.a",
        ),
        ({"items": {"anyOf": [{"required": ["a"], "minProperties": 3}]}}, "schema $.items.anyOf[0]"),
        ({"x-guidance": {"json_allowed_escapes": "nu"}}, "without effect"),
        ({"const": {"a": ["b\0"]}}, "schema $.const"),
        ({"items": {"enum": [1, {"\x1f": 2}]}}, "schema $.items.enum"),
        ({"properties": {"k\x0b": {}}}, "schema $.properties"),
        ({"required": ["\x01"]}, "schema $.required"),
        ({"items": {"pattern": "^a\\"}}, "schema $.items.pattern"),
        ({"patternProperties": {"\\": {}}}, "schema $.patternProperties"),
    ],
)
def test_keys_that_could_come_twice_or_be_spelled_otherwise_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        schema_text(schema)
    assert words in str(caught.value)
    assert schema_text({"minProperties": 2, "required": ["a"], "enum": [{"minProperties": 9}, "\b\t\n\f\r\x7f"]})
    assert schema_text({"pattern": "a\\\\", "const": "a\\"})


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused_and_freed(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "_SECONDS", 0.1)
    cache, real, go_on, freed = guides.cache, Library.call, threading.Event(), threading.Event()

    def slow(self: Library, name: str, *arguments: Any) -> Any:
        if name == "llg_new_matcher":
            go_on.wait(20)
        result = real(self, name, *arguments)
        if name == "llg_free_matcher":
            freed.set()
        return result

    monkeypatch.setattr(Library, "call", slow)
    with pytest.raises(RequestError, match="takes too long"):
        guides.matcher(StructuredOutputs(regex="ab*"))
    others = [threading.Thread(target=_try, args=(guides, f"a{place}")) for place in range(3)]
    for each in others:
        each.start()
    for each in others:
        each.join(20)
    with pytest.raises(RequestError, match="other grammars are being compiled"):
        guides.matcher(StructuredOutputs(regex="ac*"))
    go_on.set()
    for _ in range(matcher._AT_ONCE):
        assert cache._compilers.acquire(timeout=20), "those that took too long have ended"
    for _ in range(matcher._AT_ONCE):
        cache._compilers.release()
    gc.collect()
    assert freed.wait(20)
    assert guides.matcher(StructuredOutputs(regex="ab*")).allowed().any()


def _try(guides: Guides, regex: str) -> None:
    with pytest.raises(RequestError):
        guides.matcher(StructuredOutputs(regex=regex))


def test_numbers_that_would_end_the_process_are_refused_inside_a_grammar_too(guides: Guides) -> None:
    for text in ('start: %json {"const": -9223372036854775808}', 'start: "a" %json {"enum": [-9223372036854775807]}'):
        with pytest.raises(RequestError, match="a whole number is too large"):
            guides.matcher(StructuredOutputs(grammar=text))
    assert guides.matcher(StructuredOutputs(json={"enum": [-(2**62), 2**63, -1e19]})) is not None
