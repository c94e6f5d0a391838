"""Texts of a grammar that leave the model no choice, and how long they can get.

The library writes such a text to its end before it gives the next token: the tokens are then those that the model was
trained on, and the step pays for all of it. Where such a text can be long, the library is told not to look ahead; nor
where a grammar names an ordinary token by its id, which the library would write as digits.
"""

import contextlib
import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from ingot.errors import RequestError
from ingot.runtime.guided.reach import LarkRules, count_bytes, lark_marks, lark_strings, of_regex

MOST_BYTES = 16_384
"""Of one text."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of JSON, unless the request says it: models that love white space would write nothing else."""

_LOOKED_AHEAD = 1024  # bytes: one to two milliseconds, in one step
_NO_LOOKING = '\n%llguidance {"no_forcing": true}\n'  # the last one counts
_MEASURED = 1 << 16  # characters of a grammar: what is longer may force anything
_PLAIN = re.compile(r"[^|()\[\]{}*+?.]+")
_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)


def released(kind: str, text: str, controls: Container[int]) -> tuple[str, str]:
    """The same grammar. Where it can force a long text or an ordinary token, it is in Lark and written token by token.
    kind: see GrammarCache.new. controls: ids of the control tokens.
    """
    with contextlib.suppress(RecursionError):
        short = len(text) <= _MEASURED and _MEASURES[kind](text) <= _LOOKED_AHEAD
        if short and not (kind == "lark" and _names_ordinary_tokens(text, controls)):
            return kind, text
    if kind == "json_schema":
        text = f"start: %json {text}"
    elif kind == "regex":
        text = f"start: /{_ESCAPED.sub(_in_slashes, text)}/"
    return "lark", text + _NO_LOOKING


def _names_ordinary_tokens(text: str, controls: Container[int]) -> bool:
    numbers = (each[1:-1] for each in lark_marks(text) if each.startswith("["))
    return any(not each.isdecimal() or int(each) not in controls for each in numbers)


def _in_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def refuse_long_in(kind: str, text: str) -> None:
    """As refuse_long, for the texts of "regex" or "lark"."""
    if len(text) * 4 > MOST_BYTES:
        for part in _PLAIN.findall(text) if kind == "regex" else lark_strings(text):
            refuse_long(part, f"structured_outputs.{'regex' if kind == 'regex' else 'grammar'}")


def refuse_long(text: str, where: str | None = None) -> None:
    """Raises RequestError for a text beyond MOST_BYTES."""
    if len(text) * 4 <= MOST_BYTES or count_bytes(text) <= MOST_BYTES:
        return
    raise RequestError(
        "structured_outputs: a text of the grammar is too long",
        where=where,
        expected=f"at most {MOST_BYTES} bytes",
        got=f"{json.dumps(text[:30], ensure_ascii=False)} and so on, {len(text)} characters",
        hint="shorten it, or let the model write a name in its place",
    )


# How many bytes a grammar can force in a row, at most.


def _of_schema_text(text: str) -> float:
    return _of_schema(json.loads(text))


def _of_schema(schema: Any) -> float:
    """White space between the parts is a choice, if there may be any."""
    texts, written = list(_texts(schema)), json.dumps(schema)
    if schema.get("x-guidance", {}).get("whitespace_pattern") == WHITESPACE:
        return max(texts, default=0)
    if '"$ref"' in written:
        return math.inf
    repeats = math.prod(max(int(each), 1) for each in re.findall(r'"minItems": (\d{1,9})', written))
    return (sum(texts) + written.count(":") * 4) * repeats


def _texts(schema: Any) -> Iterator[float]:
    """Bytes of keys, constants, choices and patterns."""
    stack = [schema]
    while stack:
        each = stack.pop()
        if isinstance(each, list):
            stack += each
        elif isinstance(each, str):  # in a list of keys or choices
            yield count_bytes(each) + 2
        elif isinstance(each, Mapping):
            for key, value in each.items():
                yield count_bytes(key) + 2
                if key == "patternProperties" and isinstance(value, Mapping):
                    yield from map(_of_regex, value)
                if key == "const":
                    yield count_bytes(json.dumps(value, ensure_ascii=False))
                elif key == "pattern" and isinstance(value, str):
                    yield _of_regex(value)
                elif key == "enum" and isinstance(value, list):
                    yield from (count_bytes(json.dumps(one, ensure_ascii=False)) for one in value)
                elif isinstance(value, Mapping | list):
                    stack.append(value)


def _of_regex(regex: str) -> float:
    return of_regex(regex).longest


def _of_lark(text: str) -> float:
    return LarkRules(text, _of_schema_text).longest()


_MEASURES = {"json_schema": _of_schema_text, "regex": _of_regex, "lark": _of_lark}
