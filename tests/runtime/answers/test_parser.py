"""Answers in every wire format are read the same wherever their pieces end."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence

import pytest

from ingot.runtime.answers.answer_formats import _texts
from ingot.runtime.answers.arguments import as_json
from ingot.runtime.answers.deltas import Answer, AnswerBuilder, CallArguments, CallBegin, Content, Delta
from ingot.runtime.answers.formats import REASONING_FORMATS, WIRE_FORMATS
from ingot.runtime.answers.markers import Markers
from ingot.runtime.answers.parser import AnswerParser
from tests.runtime.answers.samples import CALLS, RESPONSE_TOKENS, RESPONSES, SAMPLES, SCHEMAS, TOKENS, without_text

WIRES = {each.name: each for each in WIRE_FORMATS}
THINKS = {each.name: each for each in REASONING_FORMATS}
# A text of 300 letters has 299 places: one of three, other ones in formats whose names are longer; in CI, each.
SOME_PLACES = pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])


def reader(
    wire: str | None, reasoning: str | None = None, *, tokens: Sequence[str] = (), reasons: bool = False
) -> AnswerParser:
    form, thinks = WIRES.get(wire or ""), THINKS.get(reasoning or "")
    markers = Markers({text: number for number, text in enumerate(tokens)}, _texts(form, thinks))
    ids = itertools.count()
    return AnswerParser(markers, form, thinks, tools=SCHEMAS, reasons=reasons, make_id=lambda: f"id{next(ids)}")


def deltas(parser: AnswerParser, pieces: Iterable[str], *, cut: bool = False) -> list[Delta]:
    found: list[Delta] = []
    for piece in pieces:
        parser.push(piece)
        found += parser.drain()
    parser.finish(cut=cut)
    return [*found, *parser.drain()]


def read(parser: AnswerParser, pieces: Iterable[str], *, cut: bool = False) -> Answer:
    built = AnswerBuilder()
    built.add(deltas(parser, pieces, cut=cut))
    return built.answer()


def marked(parser: AnswerParser, text: str) -> list[str]:
    """Characters, and of each token the one that the parser is given for it."""
    return list(parser._markers.coded(text))


def calls(answer: Answer) -> list[tuple[str, object]]:
    return [(each.name, json.loads(each.arguments)) for each in answer.calls]


def _dsml(key: str, is_text: str, value: str, section: str = "function_calls") -> str:
    parameter = f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>'
    invoke = f'<｜DSML｜invoke name="get_weather">\n{parameter}\n</｜DSML｜invoke>'
    return f"<｜DSML｜{section}>\n{invoke}\n</｜DSML｜{section}>"


@pytest.mark.daily(1)
@pytest.mark.parametrize("tokens", [(), TOKENS], ids=["letters", "tokens"])
@pytest.mark.parametrize("name", SAMPLES)
@SOME_PLACES
def test_every_format_wherever_pieces_end(name: str, tokens: Sequence[str], stride: int) -> None:
    before = "" if without_text(name) else "I look.\n"

    def parser() -> AnswerParser:
        return reader(name, "harmony" if name == "harmony" else None, tokens=tokens)

    pieces = marked(parser(), before + SAMPLES[name])
    whole = read(parser(), ["".join(pieces)])
    assert calls(whole) == CALLS[: len(whole.calls)]
    assert len(whole.calls) == (1 if name == "harmony" else 2)
    assert whole.content == (before.strip() or None)
    assert read(parser(), pieces) == whole
    for place in range(1 + len(name) % stride, len(pieces), stride):
        assert read(parser(), ["".join(pieces[:place]), "".join(pieces[place:])]) == whole, pieces[:place]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("name", "begin", "end", "rest"), RESPONSES)
def test_marked_text_before_calls_is_read_wherever_tokens_end(name: str, begin: str, end: str, rest: str) -> None:
    def parser() -> AnswerParser:
        return reader(name, name, tokens=[*TOKENS, *RESPONSE_TOKENS])

    pieces = marked(parser(), f"{begin}I look.{end}{SAMPLES[name]}{rest}")
    for place in range(len(pieces)):
        found = read(parser(), ["".join(pieces[:place]), "".join(pieces[place:])])
        assert (found.content, calls(found)) == ("I look.", CALLS), pieces[:place]


def test_every_row_has_a_sample() -> None:
    assert set(SAMPLES) == set(WIRES)


@pytest.mark.parametrize("name", [None, *SAMPLES])
def test_what_calls_nothing_passes_as_it_is(name: str | None) -> None:
    for text in ("", " \n", " A <b> and { [x] }, \n\n", '{"a": [1, 2]}', "[1, 2]", "<tool", 'He said "[TOOL_" \n'):
        if name == "harmony":
            continue
        assert (read(reader(name), list(text)).content or "") == text


@pytest.mark.daily(1)
@pytest.mark.parametrize("tokens", [(), TOKENS], ids=["letters", "tokens"])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("glm47", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", {"a": "x"}),
        ("glm4", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>", {"a": "x"}),
        ("gemma4", '<|tool_call>:f{a:<|"|>x<|"|>}<tool_call|>', {"a": "x"}),
        ("gemma4", '<|tool_call>f{a:<|"|>x<|"|>}<tool_call|>', {"a": "x"}),
        ("llama4_pythonic", "[get_time(tz='UTC')]", {"tz": "UTC"}),
        ("deepseek_v32", _dsml("days", "true", "5"), {"days": 5}),
        ("deepseek_v32", _dsml("days", "true", "five"), {"days": "five"}),
        ("deepseek_v4", _dsml("city", "false", "5", "tool_calls"), {"city": "5"}),
        ("deepseek_v4", _dsml("other", "false", "5", "tool_calls"), {"other": 5}),
    ],
)
def test_calls_that_differ_a_little_from_the_template(
    name: str, text: str, expected: object, tokens: Sequence[str]
) -> None:
    pieces = marked(reader(name, tokens=tokens), text)
    whole = read(reader(name, tokens=tokens), [text if not tokens else "".join(pieces)])
    assert [json.loads(each.arguments) for each in whole.calls] == [expected]
    assert whole.content is None
    for place in range(1, len(pieces)):
        assert read(reader(name, tokens=tokens), ["".join(pieces[:place]), "".join(pieces[place:])]) == whole


@pytest.mark.daily(12)
@pytest.mark.parametrize("tokens", [(), TOKENS], ids=["letters", "tokens"])
@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"harmony", "llama3_json", "pythonic", "xlam"}))
@SOME_PLACES
def test_an_answer_that_is_cut_within_a_call_leaks_no_mark(name: str, tokens: Sequence[str], stride: int) -> None:
    pieces = marked(reader(name, tokens=tokens), SAMPLES[name])
    calls = reader(name)._calls
    assert calls is not None
    opened = len(marked(reader(name, tokens=tokens), calls.openers[0]))
    for place in range(opened + len(name) % stride, len(pieces) + 1, stride):
        found = read(reader(name, tokens=tokens), ["".join(pieces[:place])], cut=True)
        assert found.content is None, "".join(pieces[:place])
    assert read(reader(name, tokens=tokens), pieces[: opened + 20], cut=True) == read(
        reader(name, tokens=tokens), ["".join(pieces[: opened + 20])], cut=True
    )


def test_a_list_that_calls_no_tool_is_content() -> None:
    for text in ("[1, 2]", "[other(a=1)]", "[get_time(1)]"):
        assert read(reader("llama4_pythonic"), list(text)).content == text


def test_letters_of_a_marker_are_content_where_it_is_a_token() -> None:
    text = SAMPLES["hermes"]
    assert read(reader("hermes", tokens=["<tool_call>", "</tool_call>"]), [text]) == Answer(
        content=text, reasoning=None, calls=()
    )


def test_names_and_ids_come_once_and_arguments_follow() -> None:
    found = deltas(reader("hermes"), list(SAMPLES["hermes"]))
    begins = [each for each in found if isinstance(each, CallBegin)]
    assert [(each.index, each.name, each.call_id) for each in begins] == [
        (0, "get_weather", "id0"),
        (1, "get_time", "id1"),
    ]
    assert len([each for each in found if isinstance(each, CallArguments)]) > 20, "arguments stream"
    assert not [each for each in found if isinstance(each, Content)]


def test_a_parameter_streams_as_soon_as_it_opens() -> None:
    parser = reader("qwen3_coder")
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nBer")
    assert [each.text for each in parser.drain() if isinstance(each, CallArguments)] == ['{"city": "Ber']


def test_ids_on_the_wire_are_kept() -> None:
    assert [each.call_id for each in read(reader("kimi_k2"), [SAMPLES["kimi_k2"]]).calls] == [
        "functions.get_weather:0",
        "functions.get_time:1",
    ]
    assert [each.call_id for each in read(reader("mistral_v11"), [SAMPLES["mistral_v11"]]).calls] == [
        "id0",
        "abcdefghi",
    ]


_NESTED = {"o": {"b": True, "l": [1, "x"]}}
_LITERALS = {"tz": "a)]", "n": -1.5, "o": {"k": [None, True]}}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"tz": "CET"}, "name": "get_time"}', {"tz": "CET"}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\"tz\\": \\"CET\\"}"}</tool_call>', {"tz": "CET"}),
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"tz": "a\nb"}}</tool_call>', {"tz": "a\nb"}),
        ("qwen3_coder", "<function=get_time>\n<parameter=tz>\nCET\n</function>", {"tz": "CET"}),
        ("qwen3_coder", "<tool_call><function=get_time><parameter=tz>\n<b>\n\n</parameter>", {"tz": "<b>\n"}),
        ("qwen3_coder", "<function=get_time>\n<parameter=tz>\n12", {"tz": "12"}),
        ("qwen3_coder", "<function=get_time>\n<parameter=n>\n[1, {}]\n</parameter>", {"n": [1, {}]}),
        ("glm4", "<tool_call>get_time</tool_call>", {}),
        (
            "gemma4",
            '<|tool_call>call:get_time{o:{b:true,l:[1,<|"|>x<|"|>]}}<tool_call|>',
            {"o": {"b": True, "l": [1, "x"]}},
        ),
        (
            "pythonic",
            "[get_time(tz='a)]', n=-1.5, o={'k': [None, true]})]",
            {"tz": "a)]", "n": -1.5, "o": {"k": [None, True]}},
        ),
        ("pythonic", "[get_time(tz='sed -n '1,2p' a\nb', n=3)]", {"tz": "sed -n '1,2p' a\nb", "n": 3}),
        ("pythonic", r"[get_time(tz='C:\users\d', n='\u00e9\x41\'')]", {"tz": r"C:\users\d", "n": "éA'"}),
        ("pythonic", "[get_time(tz='', n={'a', 'b'}, o='''x\n'y' z''')]", {"tz": "", "n": ["a", "b"], "o": "x\n'y' z"}),
        ("lfm2", "<|tool_call_start|> [get_time(tz='a]')]", {"tz": "a]"}),
        ("seed_oss", "<seed:tool_call><function=get_time><parameter=tz>['a']</parameter>", {"tz": "['a']"}),
    ],
)
def test_what_models_write_beside_their_templates(name: str, text: str, expected: object) -> None:
    for pieces in ([text], list(text)):
        answer = read(reader(name), pieces)
        assert calls(answer) == [("get_time", expected)]
        assert answer.content is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "The mark <tool_call> begins one."),
        ("hermes", '<tool_call>{"nam'),
        ("qwen3_coder", "A <function= and more"),
        ("glm4", "<tool_call> is a mark\nof calls"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[get_time(a=__import__('os'))]"),
        ("mistral", "[TOOL_CALLS]nothing"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(reader(name), pieces) == Answer(content=text, reasoning=None, calls=())


def test_lists_and_objects_may_be_pythons() -> None:
    """As the template of Seed-OSS writes them, which has no JSON."""
    text = "['a', {'b': None}]"
    assert as_json(text, frozenset(("array",))) == '["a", {"b": null}]'
    assert as_json("{'a': True}", frozenset(("object", "null"))) == '{"a": true}'
    for kinds in (("string",), ("string", "array"), ("integer",), ()):
        assert json.loads(as_json(text, frozenset(kinds))) == text
    assert json.loads(as_json("[__import__('os')]", frozenset(("array",)))) == "[__import__('os')]"


def test_a_cut_answer_closes_nothing() -> None:
    text = "<tool_call>\n<function=get_time>\n<parameter=tz>\nCE"
    (call,) = read(reader("qwen3_coder"), [text], cut=True).calls
    assert call.arguments == '{"tz": "CE'
    (call,) = read(reader("hermes"), ['<tool_call>{"name": "get_time", "arguments": {"tz": "CE'], cut=True).calls
    assert call.arguments == '{"tz": "CE'


_THOUGHTS = [
    ("think", "<think>\nI see.\n\n</think>\n\nYes.", False),
    ("think", "I see.\n</think>Yes.", True),
    (
        "kimi_k3",
        "I see.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        True,
    ),
    ("mistral", "[THINK]I see.[/THINK]Yes.", False),
    ("gemma4", "<|channel>thought\nI see.\n<channel|>Yes.", False),
    ("hunyuan", "<think>\nI see.\n</think>\n<answer>\nYes.\n</answer>", False),
    ("ernie45", "I see.\n</think>\n\n<response>\nYes.\n</response>\n", True),
    ("command", "<|START_THINKING|>I see.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", False),
    ("granite", "Here is my thought process: I see.\nHere is my response: Yes.", False),
    ("apriel", "I see.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]", True),
    ("harmony", "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", False),
]


@pytest.mark.parametrize(("name", "text", "reasons"), _THOUGHTS, ids=lambda each: str(each)[:12])
def test_reasoning_wherever_pieces_end(name: str, text: str, reasons: bool) -> None:
    expected = Answer(content="Yes.", reasoning="I see.", calls=())
    for tokens in ((), TOKENS):
        pieces = marked(reader(None, name, tokens=tokens), text)
        for place in range(len(pieces)):
            halves = ["".join(pieces[:place]), "".join(pieces[place:])]
            assert read(reader(None, name, tokens=tokens, reasons=reasons), halves) == expected


def test_reasoning_then_calls() -> None:
    text = f"Now.\n</think>\n\n{SAMPLES['hermes']}"
    answer = read(reader("hermes", "think", reasons=True), list(text))
    assert (answer.reasoning, answer.content, calls(answer)) == ("Now.", None, CALLS)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("name", "reasoning"),
    [
        *((name, "think") for name in ("qwen3_coder", "hermes", "kimi_k2", "deepseek_v31", "deepseek_v32")),
        *((name, "think") for name in ("deepseek_v4", "glm4", "glm47", "minimax_m2")),
        *((name, name) for name in ("minimax_m3", "seed_oss", "kimi_k3")),
    ],
)
def test_a_call_ends_the_reasoning_wherever_pieces_end(name: str, reasoning: str) -> None:
    def parser() -> AnswerParser:
        return reader(name, reasoning, tokens=TOKENS, reasons=True)

    pieces = marked(parser(), f"Now.\n{SAMPLES[name]}")
    for place in range(len(pieces)):
        answer = read(parser(), ["".join(pieces[:place]), "".join(pieces[place:])])
        assert (answer.reasoning, answer.content, calls(answer)) == ("Now.", None, CALLS), pieces[:place]
    assert read(parser(), pieces) == answer
    letters = read(reader(name, reasoning, reasons=True), [f"Now.\n{SAMPLES[name]}"])  # no tokens: thoughts of a call
    assert not letters.calls
    assert str(letters.reasoning).startswith("Now.\n")


def test_messages_of_harmony() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{"tz":"CET"}'
    )
    for tokens in ((), TOKENS):
        parser = reader("harmony", "harmony", tokens=tokens)
        answer = read(parser, marked(parser, text))
        assert (answer.reasoning, answer.content) == ("Hm.", "I look.")
        assert calls(answer) == [("get_time", {"tz": "CET"})]


@pytest.mark.slow
def test_deep_values_cost_no_recursion() -> None:
    deep = "[" * 50_000 + "]" * 50_000
    text = f'<tool_call>{{"name": "get_time", "arguments": {{"tz": {deep}}}}}</tool_call>'
    (call,) = read(reader("hermes"), [text]).calls
    assert call.arguments == f'{{"tz": {deep}}}'
    assert read(reader("qwen3_coder"), [f"<function=get_time><parameter=n>{deep}</parameter>"]).calls[0].arguments


def test_rows_can_be_told_apart() -> None:
    names = [each.name for each in WIRE_FORMATS]
    assert len(set(names)) == len(names)
    assert all(dataclasses.asdict(each)["signs"] for each in (*WIRE_FORMATS, *REASONING_FORMATS))
