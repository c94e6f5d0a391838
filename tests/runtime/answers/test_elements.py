"""Arguments as nested elements: what they hold by the schema, wherever tokens end; and grammars of them."""

import itertools
import json
import random
from typing import Any

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.answers.answer_formats import AnswerFormats, _texts
from ingot.runtime.answers.deltas import Answer, CallArguments
from ingot.runtime.answers.markers import Markers
from ingot.runtime.answers.parser import AnswerParser
from ingot.runtime.answers.tool_grammar import ToolGrammar
from ingot.runtime.answers.tool_rules import with_tools
from ingot.runtime.answers.tools import read_tools
from tests.runtime.answers.samples import m3
from tests.runtime.answers.test_parser import WIRES, deltas, marked, read
from tests.runtime.answers.test_tools import Texts

WIRE = WIRES["minimax_m3"]
MARK = "]<]minimax[>["
TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parts": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["name"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "user": {"type": "integer"},
        "note": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "ship": {"type": "object", "properties": {"zip": {"type": "integer"}, "to": {"type": "string"}}},
        "either": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
        "maybe": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
        "mode": {"enum": ["on", "off"]},
        "free": {"type": "object"},
        "tree": {"$ref": "#/$defs/tree"},
        "-n": {"type": ["integer", "null"]},
    },
    "$defs": {"tree": TREE},
}


def parser(tokens: tuple[str, ...] = (), schema: object = SCHEMA) -> AnswerParser:
    markers = Markers({text: number for number, text in enumerate(tokens)}, _texts(WIRE, None))
    ids = itertools.count()
    return AnswerParser(markers, WIRE, None, tools={"order": schema}, reasons=False, make_id=lambda: f"id{next(ids)}")


def invoked(arguments: str) -> str:
    return m3(f'<invoke name="order">{arguments}</invoke>\n')


def arguments_of(answer: Answer) -> Any:
    (call,) = answer.calls
    assert call.name == "order"
    assert answer.content is None
    return json.loads(call.arguments)


CASES = [
    ("<user> 7 </user><note>\n a & c\n</note>", {"user": 7, "note": "\n a & c\n"}),
    ("<tags><item>a</item><item>3</item></tags>", {"tags": ["a", "3"]}),
    ("\n<tags>\n<item>a</item>\n<item>b</item>\n</tags>\n", {"tags": ["a", "b"]}),
    ("<ship><zip>018956</zip><to>12</to></ship>", {"ship": {"zip": "018956", "to": "12"}}),
    ("<ship><zip>8956</zip></ship><-n>null</-n>", {"ship": {"zip": 8956}, "-n": None}),
    ("<either><item>1</item></either>", {"either": [1]}),
    ("<either>1</either><maybe>null</maybe>", {"either": "1", "maybe": None}),
    ("<pair><item>1</item><item>2</item></pair>", {"pair": ["1", 2]}),
    ("<tags></tags><ship></ship><note></note><either></either>", {"tags": [], "ship": {}, "note": "", "either": ""}),
    ("<tags>a</tags><tags>b</tags><user>1</user>", {"tags": ["a", "b"], "user": 1}),
    ("<note>a</note><user>1</user><note>b</note><user>2</user>", {"note": "a", "user": 1}),
    ("<free><t>x</t><t>y</t></free>", {"free": {"t": ["x", "y"]}}),
    ("<free><l><item>1</item><item>x</item></l></free>", {"free": {"l": [1, "x"]}}),
    ("<free>hi <k>v</k> there</free>", {"free": {"k": "v", "$text": "hi  there"}}),
    ('<free>{"a": [1, {}]}</free>', {"free": {"a": [1, {}]}}),
    ("<free><tool_call>v</tool_call></free>", {"free": {"tool_call": "v"}}),
    (
        "<tree><name>a</name><parts><item><name>1</name></item></parts></tree>",
        {"tree": {"name": "a", "parts": [{"name": "1"}]}},
    ),
    ("<new>3</new><other><item>x</item></other>", {"new": 3, "other": ["x"]}),
    # What models forget.
    ("<user>1<note>x</note>", {"user": 1, "note": "x"}),
    ("<note>x<user>1</user>", {"note": "x", "user": 1}),
    ("<ship><zip>1</ship><user>2</user>", {"ship": {"zip": 1}, "user": 2}),
    ("<note>a</not><user>2</user>", {"note": "a", "user": 2}),
    ("<user>1</user> so <note>x</note>", {"user": 1, "note": "x"}),
    ("<note>a <b>c</b> d</note>", {"note": f"a {MARK}<b>c"}),
    ("", {}),
]


@pytest.mark.daily(5)
@pytest.mark.parametrize("tokens", [(), (MARK,)], ids=["letters", "token"])
@pytest.mark.parametrize(("text", "expected"), CASES)
def test_elements_are_what_the_schema_says_wherever_pieces_end(
    text: str, expected: object, tokens: tuple[str, ...]
) -> None:
    pieces = marked(parser(tokens), invoked(text))
    whole = read(parser(tokens), ["".join(pieces)])
    assert arguments_of(whole) == expected
    assert read(parser(tokens), pieces) == whole
    for place in range(1, len(pieces)):
        assert read(parser(tokens), ["".join(pieces[:place]), "".join(pieces[place:])]) == whole, pieces[:place]


def test_a_cut_call_is_not_closed_and_leaks_no_mark() -> None:
    text = invoked("<user>42</user><tags><item>a</item></tags><note>xy</note>")
    whole = read(parser(), [text])
    for place in range(text.index("order") + 6, text.rindex(f"{MARK}</invoke>")):
        found = read(parser(), list(text[:place]), cut=True)
        assert found.content is None
        for call in found.calls:
            assert whole.calls[0].arguments.startswith(call.arguments), text[:place]
            assert not call.arguments.endswith("}")


def test_strings_stream_and_calls_may_lack_all_ends() -> None:
    reader = parser()
    reader.push(invoked("<note>Ber").split(f"{MARK}</invoke>")[0])
    assert [each.text for each in reader.drain() if isinstance(each, CallArguments)] == ['{"note": "Ber']
    text = invoked("<user>1</user><note>Berlin").split(f"{MARK}</invoke>")[0]
    assert arguments_of(read(parser(), list(text))) == {"user": 1, "note": "Berlin"}


@pytest.mark.slow
def test_elements_within_elements_without_end_are_read() -> None:
    deep = "<n>" * 500 + "v" + "</n>" * 500
    for pieces in ([invoked(f"<free>{deep}</free>")], list(invoked(f"<free>{deep}</free>"))):
        assert "free" in arguments_of(read(parser(), pieces))
    draw = random.Random(31)
    tags = ["<", "</", "<item>", "</item>", "<free>", "</free>", "<note>", "</note>", "x", ">", "", "\n", "<user>", "1"]
    for _ in range(300):
        text = invoked("".join(draw.choices(tags, k=draw.randrange(12))))
        whole = read(parser(), [text])
        assert read(parser(), list(text)) == whole
        assert all(isinstance(json.loads(each.arguments), dict) for each in whole.calls)


@pytest.fixture(scope="module", params=["letters", "token"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    pytest.importorskip("llguidance", reason="needs llguidance")
    return Texts(tmp_path_factory.mktemp("texts"), [MARK] if request.param == "token" else [])


TAKEN = [
    ("<user>7</user><note>a & b; c</note>", True),
    ("<user>x</user>", False),
    ("<user>7</user><user>8</user>", False),
    ("<note>a</user>", False),
    ("<tags><item>a</item><item>3</item></tags>", True),
    ("<tags></tags>", True),
    ("<tags>a</tags>", False),
    ("<ship><zip>1</zip><to>x</to></ship>", True),
    ("<ship><zip>x</zip></ship>", False),
    ("<ship><zip>1</zip><more>1</more></ship>", False),
    ("<maybe><item>x</item></maybe>", True),
    ("<maybe>null</maybe>", True),
    ("<maybe>none</maybe>", False),
    ("<mode>on</mode>", True),
    ("<mode>onoff</mode>", False),
    ('<free>{"a": [1, {}]}</free>', True),
    ("<free>{</free>", False),
    ("<tree><name>a</name><parts><item><name>b</name></item></parts></tree>", True),
    ("<tree><name>a</name><parts><item><parts></parts></item></parts></tree>", False),
    ("<-n>null</-n>", True),
    ("<new>1</new>", False),
]


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "order"}}])
def test_grammars_hold_calls_to_their_schema(texts: Texts, choice: Any) -> None:
    held = {**SCHEMA, "properties": {name: each for name, each in SCHEMA["properties"].items() if name != "either"}}
    order = {"type": "function", "function": {"name": "order", "parameters": held, "strict": True}}
    grammar = ToolGrammar(WIRE, read_tools([order], choice), texts.guides.wire).text()
    for text, expected in TAKEN:
        assert texts.takes(invoked(text), grammar) is expected, text
        if expected:
            found = read(parser((MARK,)), ["".join(marked(parser((MARK,)), invoked(text)))])
            assert arguments_of(found).keys() <= held["properties"].keys()
    assert texts.takes("Just so.", grammar) is (choice == "auto")


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, "<item>1</item>", False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, "<item>1</item>" * 2, True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, "<item>1</item>" * 4, False),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "<item><item>1</item></item><item></item>",
            True,
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1000}, "[1]", False),
        ({"type": "object", "properties": {"a>": {"type": "integer"}}, "required": ["a>"]}, '{"a>": 1}', True),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"k": "x"}', False),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]},
            "<a>1</a>",
            False,
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        ({"const": 3}, "3", True),
        ({"const": 3}, "4", False),
        ({"type": "integer", "minimum": 2}, "1", False),
        ({}, "anything at all", True),
    ],
)
def test_values_of_a_grammar(texts: Texts, schema: object, text: str, expected: bool) -> None:
    whole = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    order = {"type": "function", "function": {"name": "order", "parameters": whole}}
    grammar = ToolGrammar(WIRE, read_tools([order], "required"), texts.guides.wire).text()
    assert texts.takes(invoked(f"<v>{text}</v>"), grammar) is expected
    if expected and text[0] in "[{":
        assert arguments_of(read(parser(schema=whole), [invoked(f"<v>{text}</v>")])) == {"v": json.loads(text)}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a>b": {}}}, "the name of an argument as a tag"),
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "without quotes"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "x"}}}}, "without quotes"),
        ({"properties": {"a": {"not": {}}}}, "parameters of order"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "parameters of order"),
        ({"properties": {"a": SCHEMA["properties"]["either"]}}, "without quotes"),
    ],
)
def test_what_elements_cannot_be_held_to_is_refused(texts: Texts, schema: dict[str, Any], words: str) -> None:
    order = {"type": "function", "function": {"name": "order", "parameters": {"type": "object", **schema}}}
    found = AnswerFormats.find([], texts.tokenizer, "minimax_m3", "none")
    with pytest.raises(RequestError) as caught:
        with_tools(SamplingParams(), read_tools([order], "required"), found, texts.guides)
    assert words in str(caught.value)


def test_deltas_do_not_depend_on_pieces_of_many_calls() -> None:
    text = m3(*(f'<invoke name="order"><note>{n}</note><user>{n}</user></invoke>\n' for n in range(3)))
    whole = read(parser(), [text])
    assert [json.loads(each.arguments) for each in whole.calls] == [{"note": str(n), "user": n} for n in range(3)]
    assert len(deltas(parser(), list(text))) >= 9
