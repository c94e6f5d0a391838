"""Contents that are hard to carry, in every wire format: written by a template, read wherever tokens end, and cut."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.answers.answer_formats import _texts
from ingot.runtime.answers.deltas import Answer, AnswerBuilder
from tests.runtime.answers.samples import SAMPLES, TOKENS, without_text
from tests.runtime.answers.templates import FAMILIES
from tests.runtime.answers.test_parser import read, reader
from tests.runtime.answers.test_templates import CONTENT, REASONING, Conversation, called, conversation
from tests.spanning import often

Calls = list[tuple[str, dict[str, Any]]]
CONTENTS: dict[str, Calls] = {
    "texts that read like values": [
        ("get_weather", {"city": each}) for each in ("3", "true", "null", "3.0", "[1]", '{"a": 1}', '"x"', "")
    ],
    "no arguments": [("get_time", {}), ("get_weather", {}), ("get_time", {"tz": "Z"})],
    "white space": [("get_time", {"tz": each}) for each in ("\n a \n", "  ", "\t", "a\r\nb", "\n\n")],
    "unicode": [("get_weather", {"city": "e\u0301\U0001f600 \u202e\u05e2\u05d1 \u4f60\u597d \u200d\ufe0f"})],
    "quotes": [("get_time", {"tz": each}) for each in ("'\"\\", '\\"', "\\n", "}]), ", "a, b=1)]", "`x`", "&quot;<b>")],
    "nested": [
        (
            "get_weather",
            {"opts": {"unit": "°C", "hours": [[], [{"a": [None, True, -1.5e-3, 'x"y\\']}], {}]}, "days": 0},
        ),
        ("get_weather", {"exact": False, "opts": {}, "days": -12345678901234567890}),
    ],
    "nested, nothing empty": [
        ("get_weather", {"opts": {"unit": "°C", "hours": [[6], [{"a": [True, -1.5, 'x"y\\'], "b": {"c": "d"}}]]}}),
        ("get_weather", {"opts": {}, "exact": True}),
    ],
    "many": [("get_time", {"tz": str(n)}) for n in range(12)],
    "letters of marks": [("get_weather", {"city": " ".join(TOKENS)}), ("get_time", {"tz": "<think>x</think>"})],
}
"""Name → calls."""
_WITHOUT = {
    # Their marks are letters for this tokenizer, or a token among letters: these letters would end a value.
    "letters of marks": ("deepseek_v32", "deepseek_v4", "function_gemma"),
    # Empty elements: null, "", [] and {} of values without a schema look the same.
    "nested": ("minimax_m3",),
}
"""Content → formats that cannot carry it."""


def parse(talk: Conversation, prompt: Sequence[int], pieces: Sequence[str], *, cut: bool = False) -> Answer:
    parser, built = talk.reading.parser(prompt), AnswerBuilder()
    for piece in pieces:
        parser.push(piece)
        built.add(parser.drain())
    parser.finish(cut=cut)
    built.add(parser.drain())
    return built.answer()


@pytest.mark.daily(3)
@pytest.mark.parametrize("splits", often((2, 12), (2,)))  # of an answer, drawn anew for every format and content
@pytest.mark.parametrize("name", FAMILIES)
def test_contents_come_back_and_cuts_begin_alike(tmp_path: Path, name: str, splits: int) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    talk = conversation(tmp_path, family, TOKENS)
    content = "" if without_text(name) and name != "harmony" else CONTENT
    parts = {"content": content} | ({"reasoning_content": REASONING} if family.thinks else {})
    for what, calls in CONTENTS.items():
        if name in _WITHOUT.get(what, ()):
            continue
        prompt, ids = talk.answer(called(calls, **parts), family.turns[4])
        pieces = list(talk.pieces(ids))
        whole = parse(talk, prompt, pieces)
        assert [(each.name, json.loads(each.arguments)) for each in whole.calls] == calls, what
        assert (whole.content or "", whole.reasoning) == (content, parts.get("reasoning_content")), what
        for place in draw.sample(range(len(pieces)), min(splits, len(pieces))):
            halves = ["".join(pieces[:place]), "".join(pieces[place:])]
            again = parse(talk, prompt, halves)
            assert (again.content, again.reasoning) == (whole.content, whole.reasoning)
            assert [(each.name, each.arguments) for each in again.calls] == [
                (each.name, each.arguments) for each in whole.calls
            ], (what, place)
            marks = _texts(talk.formats.wire, talk.formats.reasoning)
            check_cut(parse(talk, prompt, pieces[:place], cut=True), whole, marks)


def check_cut(found: Answer, whole: Answer, marks: Sequence[str]) -> None:
    """An answer that ends at max_tokens or at a stop text has the beginning of the calls, and closes none of them."""
    names = [each.name for each in found.calls]
    assert names == [each.name for each in whole.calls[: len(names)]]
    for part, full in zip(found.calls, whole.calls, strict=False):
        assert full.arguments.startswith(part.arguments)
    assert all(each.arguments == full.arguments for each, full in zip(found.calls[:-1], whole.calls, strict=False))
    for got, text in ((found.content or "", whole.content or ""), (found.reasoning or "", whole.reasoning or "")):
        ends = [n for n in range(1, len(got) + 1) if any(mark.strip().startswith(got[-n:]) for mark in marks)]
        in_a_mark = any(text.startswith(got[: len(got) - n]) for n in ends)
        assert text.startswith(got) or got.startswith(text) or in_a_mark, "or in a call whose name is not there yet"


BETWEEN = {
    "hermes": "\n</tool_call>",
    "qwen3_coder": "\n</tool_call>",
    "glm4": "</tool_call>",
    "glm47": "</tool_call>",
    "seed_oss": "\n</seed:tool_call>",
    "gemma4": "<tool_call|>",
    "function_gemma": "<end_function_call>",
}
"""Formats without a section around all calls: what ends each."""


@pytest.mark.parametrize("name", BETWEEN)
def test_text_between_calls_is_content(name: str) -> None:
    first, end, second = SAMPLES[name].partition(BETWEEN[name])
    text = f"Before.\n{first}{end}\nBetween.\n{second.lstrip()}"
    whole = read(reader(name), [text])
    assert whole.content == "Before.\nBetween."
    assert [each.name for each in whole.calls] == ["get_weather", "get_time"]
    for place in range(1, len(text)):
        assert read(reader(name), [text[:place], text[place:]]) == whole, text[:place]
