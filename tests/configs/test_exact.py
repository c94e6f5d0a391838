"""Numbers, texts and records at the edges of what their fields hold."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import pytest

from ingot.configs.exact import Between, Like, MultipleOf, read_exactly
from ingot.errors import EngineError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    number: Annotated[int, Between(4, 256), MultipleOf(4)]
    word: Annotated[str, Like("[a-z]+", "a word")] | None
    parts: Mapping[str, tuple[float, ...]]


SOUND: dict[str, Any] = {"number": 8, "word": "a", "parts": {"x": [1.0]}}


def read(values: dict[str, Any]) -> Kept:
    return read_exactly(Kept, {**SOUND, **values}, what="wrong", where="f", error=EngineError, hint="again")


@pytest.mark.parametrize("values", [{"number": 4}, {"number": 256}, {"word": None}, {"parts": {"x": []}}])
def test_both_ends_are_included(values: dict[str, Any]) -> None:
    found = read(values)
    assert all(getattr(found, name) == value for name, value in values.items() if name != "parts")
    assert found.parts == ({"x": ()} if "parts" in values else {"x": (1.0,)})


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"number": 0}, "number"),
        ({"number": 260}, "number"),
        ({"number": 6}, "number"),
        ({"number": True}, "number"),
        ({"number": 8.0}, "number"),
        ({"word": "ab1"}, "word"),
        ({"word": "a\n"}, "word"),
        ({"word": 1}, "word"),
        ({"parts": {"x": [1.0, 2]}}, "parts.x.1"),
        ({"parts": {"y": [float("inf")]}}, "parts.y.0"),
        ({"parts": [1.0]}, "parts"),
    ],
)
def test_what_lies_beyond_is_named_with_its_path(values: dict[str, Any], where: str) -> None:
    with pytest.raises(EngineError) as raised:
        read(values)
    assert raised.value.where == f"f:{where}"


def test_keys_are_those_of_the_record() -> None:
    with pytest.raises(EngineError, match="unknown: more"):
        read({"more": 1})
