"""TemplateText is str in everything that is seen, and never takes a foreign character for the template's own."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import pytest

from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.template_text import (
    TemplateText,
    as_content,
    by_template,
    concatenate,
    is_by_template,
    plain,
    stretches,
)

OURS, THEIRS = "ab ", "xy\n"  # of each character one can see whose it is


def marked(text: str) -> TemplateText:
    """Characters of OURS are the template's."""
    return concatenate(by_template(each) if each in OURS else each for each in text)


def pieces(value: Any) -> Iterable[str]:
    """Every text in a result."""
    if isinstance(value, str):
        yield value
    else:
        for each in value:
            yield from pieces(each)


OPERATIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, c: a + b + c,
    lambda a, b, c: b * 2 + 2 * a,
    lambda a, b, c: a[1:],
    lambda a, b, c: a[::-1],
    lambda a, b, c: a[-3:-1] + a[:1],
    lambda a, b, c: list(a),
    lambda a, b, c: a.join([b, c, b]),
    lambda a, b, c: a.replace(b or "x", c),
    lambda a, b, c: a.replace(b or "a", c, 1),
    lambda a, b, c: a.replace(c[:1] or "q", b),
    lambda a, b, c: a.split(),
    lambda a, b, c: a.split(None, 1),
    lambda a, b, c: a.rsplit(None, 1),
    lambda a, b, c: a.split(b[:1] or "x"),
    lambda a, b, c: a.split(b[:1] or "x", 2),
    lambda a, b, c: a.rsplit(b[:2] or "x", 1),
    lambda a, b, c: a.splitlines(),
    lambda a, b, c: a.splitlines(True),
    lambda a, b, c: a.partition(b[:1] or "x"),
    lambda a, b, c: a.rpartition(b[:1] or "x"),
    lambda a, b, c: a.strip(),
    lambda a, b, c: a.strip(b),
    lambda a, b, c: a.lstrip("ax"),
    lambda a, b, c: a.rstrip("\n "),
    lambda a, b, c: a.removeprefix(b[:1]),
    lambda a, b, c: a.removesuffix(b[:1]),
    lambda a, b, c: a.lower(),
    lambda a, b, c: a.title(),
    lambda a, b, c: a.capitalize(),
    lambda a, b, c: str(a),
]
UNKNOWN: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, c: a.center(30),
    lambda a, b, c: a.zfill(30),
    lambda a, b, c: a.expandtabs(),
    lambda a, b, c: a.upper(),
    lambda a, b, c: a.swapcase(),
    lambda a, b, c: a.replace("", b),
    lambda a, b, c: "".join([a, b]),
    lambda a, b, c: f"{a}{b}",
    lambda a, b, c: a.translate({97: "x"}),
    lambda a, b, c: a.casefold(),
    lambda a, b, c: repr(a),
]


@pytest.mark.slow
def test_every_operation_is_that_of_str_and_keeps_the_marks() -> None:
    draw = random.Random(1)
    for _ in range(300):
        texts = ["".join(draw.choices(OURS + THEIRS, k=draw.randrange(9))) for _ in range(3)]
        for operation in OPERATIONS:
            expected, got = operation(*texts), operation(*map(marked, texts))
            assert got == expected
            for each in pieces(got):
                for place, character in enumerate(each):
                    assert is_by_template(each, place, place + 1) == (character.lower() in OURS or character.isspace())


def test_what_is_not_known_is_nobodys() -> None:
    draw = random.Random(2)
    for _ in range(100):
        texts = ["".join(draw.choices(OURS + THEIRS + "\u00df", k=draw.randrange(9))) for _ in range(3)]
        for operation in UNKNOWN:
            expected, got = operation(*texts), operation(*map(marked, texts))
            assert got == expected
            for each in pieces(got):
                kept = "".join(each[begin:end] for begin, end in stretches(each))
                assert set(kept.lower()) <= set(OURS)


def test_a_percent_sign() -> None:
    assert list(stretches(by_template("<|%s|>") % "x")) == [(0, 2), (3, 5)]
    assert list(stretches(by_template("<|%s|>") % by_template("x"))) == [(0, 5)]
    assert list(stretches(by_template("%s%s") % ("x", 1))) == []
    for text, values in (("%d %s", (1, "x")), ("%% %s", "x"), ("%(a)s", {"a": "x"}), ("%5s", "x"), ("%s", {"a": 1})):
        assert by_template(text) % values == text % values
        assert not list(stretches(by_template(text) % values)) or "%s" in text
    with pytest.raises(TypeError):
        by_template("%s") % ("x", "y")
    with pytest.raises(ValueError, match="empty separator"):
        by_template("a").partition("")


@pytest.mark.parametrize("filters", ["safe", "e", "escape | safe"])
def test_what_is_added_to_safe_text_keeps_its_marks(filters: str) -> None:
    """As the templates of Mistral add their marks to the JSON of arguments."""
    source = f"{{{{ '[A]' + (c | {filters}) + '<B>' + '[C]' }}}}"
    templates = ChatTemplates({"default": source.replace("c |", "messages[0].content |")}, {}, source="")
    text = templates.render([{"role": "user", "content": '{"a": 1}[A]'}])
    assert [text[begin:end] for begin, end in stretches(text)] == ["[A]", "B", "[C]"], "< and > are HTML's"
    assert text == jinja2.Environment(autoescape=False).from_string(source).render(c='{"a": 1}[A]')


def test_it_is_a_text_like_any_other() -> None:
    text = marked("ax b")
    assert (text == "ax b", hash(text) == hash("ax b"), {"ax b": 1}[text], "x b" in text, text.find("x")) == (
        True,
        True,
        1,
        True,
        1,
    )
    assert type(plain(text)) is str
    assert list(stretches(text)) == [(0, 1), (2, 4)]
    assert list(stretches("ab")) == []
    assert TemplateText(text) == text
    assert list(stretches(TemplateText(text))) == []


def test_content_of_any_shape() -> None:
    value = {"a": ["b", {"c": ("d", 1, None, True)}], "e": 2.5}
    content = as_content(value)
    assert content == value
    assert type(content["a"][1]["c"]) is tuple
    assert all(isinstance(each, TemplateText) for each in (*content, content["a"][0], content["a"][1]["c"][0]))
    assert list(stretches(as_content(by_template("x")))) == []
