"""How long a text can get that a regular expression or a grammar in Lark forces: what all continuations begin with.

No such text is longer than the rest of the part that it begins in and the shortest text of each part behind it.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_REGEX = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<sign>\{\d+(?:,\d*)?\}|[|()?*+])|.", re.DOTALL)
_RULE = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_LARK = re.compile(
    r'(?P<string>"(?:\\.|[^"\\])*")|(?P<note>//[^\n]*|\#[^\n]*)|(?P<regex>/(?:\\.|[^/\\])*/)|(?P<json>%json\s*)'
    r"|(?P<unknown>[%@]\w+)|(?P<mark><[^<>\n]*>)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?|[|()?*+])"
)
_READ = json.JSONDecoder()


@dataclasses.dataclass(frozen=True, slots=True)
class Reach:
    """Bytes. least: the shortest text. longest: that is forced from a place in it to its end."""

    least: float
    longest: float


_UNKNOWN = Reach(math.inf, math.inf)


def of_regex(regex: str) -> Reach:
    """A set of characters counts as one that is forced."""
    return _read(
        found["sign"] or _plain(1 if found[0][0] in "\\[" else count_bytes(found[0])) for found in _matches(regex)
    )


def _matches(regex: str) -> Iterator[re.Match[str]]:
    return _REGEX.finditer(regex)


def count_bytes(text: str) -> int:
    """Bytes of a text in UTF-8. A surrogate counts as one byte."""
    return len(text.encode(errors="replace"))


def _plain(length: float) -> Reach:
    return Reach(length, length)


def _read(parts: Iterable[Reach | str]) -> Reach:
    """Parts stand one behind the other, ways beside each other, and a parenthesis opens ways of its own. Counts follow
    their part.
    """
    open_ways: list[list[list[Reach]]] = [[[]]]
    for part in parts:
        behind = open_ways[-1][-1]
        if isinstance(part, Reach):
            behind.append(part)
        elif part == "|":
            open_ways[-1].append([])
        elif part == "(":
            open_ways.append([[]])
        elif part != ")":
            behind[-1:] = [_again(behind[-1], part)] if behind else []
        elif len(open_ways) > 1:
            _close(open_ways)
    while len(open_ways) > 1:  # the library refuses it
        _close(open_ways)
    return _either(open_ways[0])


def _close(open_ways: list[list[list[Reach]]]) -> None:
    ways = open_ways.pop()
    open_ways[-1][-1].append(_either(ways))


def _either(ways: Sequence[Sequence[Reach]]) -> Reach:
    found = list(map(_one_after_the_other, ways))
    return Reach(min(each.least for each in found), max(each.longest for each in found))


def _one_after_the_other(parts: Sequence[Reach]) -> Reach:
    longest = least = 0.0
    for part in reversed(parts):
        longest, least = max(longest, part.longest + least), part.least + least
    return Reach(least, longest)


def _again(part: Reach, sign: str) -> Reach:
    """sign: "?", "*", "+", "{3}", "{3,5}" or "~3..5"."""
    found = re.search(r"\d+", sign.partition(",")[0])
    count = int(found[0][:18]) if found else int(sign == "+")
    extra = part.least * (count - 1) if count > 1 and part.least else 0
    return Reach(part.least + extra if count else 0, part.longest + extra)


def lark_strings(text: str) -> Iterator[str]:
    """Quoted texts of a grammar, without those in its schemas."""
    return (each[1:-1] for each in _pieces(text, "string"))


def lark_marks(text: str) -> Iterator[str]:
    """What a grammar names of tokens: `s` for <s>, `[5]` for <[5]>."""
    return (each[1:-1] for each in _pieces(text, "mark"))


def _pieces(text: str, kind: str) -> Iterator[str]:
    place = 0
    while (found := _LARK.search(text, place)) is not None:
        place = found.end()
        if found.lastgroup == kind:
            yield found[0]
        elif found.lastgroup == "json":
            with contextlib.suppress(ValueError):
                place = _READ.raw_decode(text, place)[1]


def lark_schemas(text: str) -> Iterator[Mapping[str, Any]]:
    """The schemas inside a grammar."""
    place = 0
    while (found := _LARK.search(text, place)) is not None:
        place = found.end()
        if found.lastgroup == "json":
            with contextlib.suppress(ValueError):
                schema, place = _READ.raw_decode(text, place)
                if isinstance(schema, Mapping):
                    yield schema


def rules_behind(text: str) -> dict[str, set[str]]:
    """Rules and terminals of a grammar: name → those that its body names."""
    bodies = _bodies(text)
    return {
        name: {found[0] for found in _LARK.finditer(body) if found.lastgroup == "name" and found[0] in bodies}
        for name, body in bodies.items()
    }


def _bodies(text: str) -> dict[str, str]:
    heads = list(_RULE.finditer(text))
    if not heads:
        return {}
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=True)}


class LarkRules:
    """The rules of one grammar. of_schema: text of a JSON schema → bytes that it can force at most."""

    def __init__(self, text: str, of_schema: Callable[[str], float]) -> None:
        self._bodies = _bodies(text)
        self._of_schema = of_schema
        self._found: dict[str, Reach] = {}

    def longest(self) -> float:
        """Infinite where a rule holds itself, or where something is not known. Raises RecursionError."""
        return self._rule("start").longest

    def _rule(self, name: str) -> Reach:
        if name not in self._found:
            self._found[name] = _UNKNOWN  # inside itself
            self._found[name] = _read(self._parts(self._bodies.get(name, "")))
        return self._found[name]

    def _parts(self, body: str) -> Iterator[Reach | str]:
        place = 0
        while (found := _LARK.search(body, place)) is not None:
            place, kind, text = found.end(), found.lastgroup, found[0]
            if kind == "sign":
                yield text
            elif kind == "json":
                length, place = self._json(body, place)
                yield _plain(length)
            elif kind == "name" and text in self._bodies:
                yield self._rule(text)
            elif kind == "regex":
                yield of_regex(text[1:-1])
            elif kind in ("string", "mark", "unknown"):
                yield _plain({"string": count_bytes(text) - 2, "mark": 1}.get(kind, math.inf))

    def _json(self, body: str, place: int) -> tuple[float, int]:
        """(bytes, where it ends)"""
        try:
            _, end = _READ.raw_decode(body, place)
            return self._of_schema(body[place:end]), end
        except (ValueError, AttributeError):
            return math.inf, len(body)
