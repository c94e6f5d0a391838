"""Typed reads of what ingot itself has written: JSON → dataclasses whose fields say what they may hold.

A field is an int, float, bool, str, None, an enum, another dataclass, a tuple or a mapping from names of these, or a
union; `Annotated[int, Between(1, 64)]` and `Annotated[str, Like("[a-z]+", "a word")]` narrow it. Every field must be
there, and no other. What must hold between fields is for the caller to check, and that the text is canonical.
"""

import dataclasses
import enum
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from ingot.errors import IngotError

Record = TypeVar("Record")
_Reader = Callable[[object], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def allows(self, value: int) -> bool:
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleOf:
    """A multiple of `unit`."""

    unit: int

    def __str__(self) -> str:
        return f"a multiple of {self.unit}"

    def allows(self, value: int) -> bool:
        return value % self.unit == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Like:
    """A text that a regular expression matches as a whole."""

    pattern: str
    words: str

    def __str__(self) -> str:
        return self.words

    def allows(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value) is not None


Count = Annotated[int, Between(1, (1 << 31) - 1)]
Bytes = Annotated[int, Between(0, (1 << 63) - 1)]


class _UnfitError(Exception):
    """A value is not what its field holds. path: keys from the value outwards."""

    def __init__(self, expected: str, got: object) -> None:
        super().__init__(expected)
        self.expected, self.got, self.path = expected, got, list[str]()


def read_exactly(
    record: type[Record], value: object, *, what: str, where: str, error: type[IngotError], hint: str
) -> Record:
    """Parsed JSON as a `record`. Raises `error`, whose words are `what`, with the path of the first wrong value."""
    try:
        kind: Any = record
        found: Record = _reader(kind)(value)
    except _UnfitError as unfit:
        path = ".".join(reversed(unfit.path))
        raise error(
            what, where=f"{where}:{path}" if path else where, expected=unfit.expected, got=_shown(unfit.got), hint=hint
        ) from None
    return found


def _shown(value: object) -> str:
    try:
        return repr(value)[:200]
    except (RecursionError, ValueError):  # nested too deep, or a number of too many digits
        return type(value).__name__


@functools.cache
def _reader(kind: Any) -> _Reader:
    """The function that reads a value of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _narrowed(_reader(arguments[0]), arguments[1:])
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments)
    if origin is tuple:
        return _list_of(_reader(arguments[0]))
    if origin is Mapping:
        return _mapping_to(_reader(arguments[1]))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record_of(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member_of(kind)
    return {int: _integer, float: _number, bool: _boolean, str: _text, type(None): _nothing}[kind]


def _integer(value: object) -> int:
    if type(value) is not int:
        raise _UnfitError("a whole number", value)
    return value


def _number(value: object) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise _UnfitError("a finite number with a decimal point", value)
    return value


def _boolean(value: object) -> bool:
    if type(value) is not bool:
        raise _UnfitError("true or false", value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _UnfitError("a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: no file and no library takes it
            raise _UnfitError("a string of Unicode characters", value) from None
    return value


def _nothing(value: object) -> None:
    if value is not None:
        raise _UnfitError("null", value)


def _narrowed(read: _Reader, limits: Sequence[Any]) -> _Reader:
    def narrowed(value: object) -> Any:
        found = read(value)
        for limit in limits:
            if not limit.allows(found):
                raise _UnfitError(str(limit), value)
        return found

    return narrowed


def _one_of(kinds: Sequence[Any]) -> _Reader:
    readers = [_reader(kind) for kind in kinds]

    def one_of(value: object) -> Any:
        expected = []
        for read in readers:
            try:
                return read(value)
            except _UnfitError as unfit:
                expected.append(unfit.expected)
        raise _UnfitError(" or ".join(expected), value)

    return one_of


def _list_of(read: _Reader) -> _Reader:
    def list_of(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _UnfitError("a list", value)
        return tuple(_at(str(place), read, each) for place, each in enumerate(value))

    return list_of


def _mapping_to(read: _Reader) -> _Reader:
    def mapping_to(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _UnfitError("an object", value)
        return {_text(key): _at(key, read, each) for key, each in value.items()}

    return mapping_to


def _member_of(kind: type[enum.Enum]) -> _Reader:
    members: dict[str, enum.Enum] = {member.value: member for member in kind}

    def member_of(value: object) -> enum.Enum:
        if not isinstance(value, str) or value not in members:
            raise _UnfitError(" or ".join(members), value)
        return members[value]

    return member_of


def _record_of(kind: type) -> _Reader:
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}

    def record_of(value: object) -> Any:
        if not isinstance(value, dict):
            raise _UnfitError("an object", value)
        if value.keys() != readers.keys():
            differences = (("missing", readers.keys() - value.keys()), ("unknown", value.keys() - readers.keys()))
            got = "; ".join(f"{word}: {', '.join(sorted(map(str, keys)))}" for word, keys in differences if keys)
            raise _UnfitError(f"an object with the keys {', '.join(readers)}", got)
        return kind(**{name: _at(name, read, value[name]) for name, read in readers.items()})

    return record_of


def _at(key: str, read: _Reader, value: object) -> Any:
    try:
        return read(value)
    except _UnfitError as unfit:
        unfit.path.append(key)
        raise
