"""Typed reads of JSON: every value is checked once, where it enters, and an error names file and key.

`Section` is one JSON object. A null is the same as an absent key. A section remembers which keys were asked for, so
that what nobody asked for can be refused (our own files) or listed (Hugging Face's).
"""

import copy
import dataclasses
import difflib
import enum
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ingot.errors import ConfigError, IngotError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Record = TypeVar("Record")

_LOOK = "look at the path and its permissions"
MAX_JSON = 32 << 20  # bytes: twice the index of the largest models; as Python objects it is some hundred MB
_MOST = (1 << 63) - 1  # what a size may be at most: ONNX and files count in 64 bits


def parse_json(text: bytes, where: str, error: type[IngotError] = ConfigError) -> object:
    """JSON of untrusted origin. Duplicate keys and endless nesting are errors like every other syntax error."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as problem:
        raise error("the file is not valid JSON", where=where, got=str(problem)) from problem


def parse_toml(text: bytes, where: str) -> "Section":
    """TOML of untrusted origin. Raises ConfigError."""
    try:
        return Section(tomllib.loads(text.decode("utf-8")), where)
    except (ValueError, RecursionError) as error:
        raise ConfigError("the file is not valid TOML", where=where, got=str(error)) from error


def read_object(path: Path) -> dict[str, object]:
    """The object in a JSON file of untrusted origin. Raises ConfigError if it is unreadable or holds something else."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise ConfigError(
                "the file is too large for what it should hold",
                where=str(path),
                expected=f"at most {MAX_JSON:,} bytes",
                got=f"{size:,} bytes",
            )
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError("the file cannot be read", where=str(path), got=error.strerror, hint=_LOOK) from error
    values = parse_json(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError("the file holds no JSON object", where=str(path), got=type(values).__name__)
    return values


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = next(key for key in values if sum(name == key for name, _ in pairs) > 1)
        raise ValueError(f"key {repeated!r} appears twice")
    return values


def nearest(name: str, known: Iterable[str]) -> str | None:
    """A hint such as "did you mean 'heads'?", or None if nothing is close."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {match[0]!r}?" if match else None


class Section:
    """One JSON object. `where` is its place: "config.json" or "config.json:rope_scaling"."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = {key for key, value in values.items() if value is None}
        self._asked: set[str] = set()
        self._nulls_read: set[str] = set()
        self._inner: dict[str, Section] = {}
        self._names: Mapping[str, str] = {}
        self.where = where

    @classmethod
    def from_file(cls, path: Path) -> "Section":
        """The object in a JSON file. Raises ConfigError as `read_object`."""
        return cls(read_object(path), str(path))

    def called(self, names: Mapping[str, str]) -> "Section":
        """The same object for a reader that knows keys by other names: its name → the file's. What it asks for counts
        here too."""
        view = copy.copy(self)
        view._names = names
        return view

    def place(self, key: str) -> str:
        """file:key, for errors."""
        key = self._names.get(key, key)
        return f"{self.where}.{key}" if ":" in Path(self.where).name else f"{self.where}:{key}"

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        key = self._names.get(key, key)
        self._asked.add(key)
        return key in self._values

    def values(self) -> dict[str, object]:
        """Everything that is there, nulls too, unchecked: for who makes another section of it."""
        return {**self._values, **dict.fromkeys(self._nulls)}

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null: for the few keys where that is not the same as absent."""
        return self._names.get(key, key) in self._nulls

    def raw(self, key: str) -> object:
        """The value as it is, None if absent."""
        key = self._names.get(key, key)
        self._asked.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        """A whole number. Without default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MOST:
            raise self._wrong(key, f"a whole number, at least {minimum}", value)
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = -math.inf, minimum: float = -math.inf
    ) -> float:
        """A finite number greater than `above`, at least `minimum`."""
        value = self._value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not above < value < math.inf
            or value < minimum
        ):
            bound = "" if above == -math.inf else f" above {above:g}"
            bound = bound if minimum == -math.inf else f", at least {minimum:g}"
            raise self._wrong(key, f"a finite number{bound}", value)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """true or false; 0, 1 and strings are errors."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; an absent one is empty."""
        values = self._value(key, [])
        finite = isinstance(values, list) and all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) for value in values
        )
        if not isinstance(values, list) or not finite:
            raise self._wrong(key, "a list of finite numbers", values)
        return tuple(values)

    def words(self, key: str) -> tuple[str, ...]:
        """A list of strings; an absent one is empty."""
        values = self._value(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self._wrong(key, "a list of strings", values)
        return tuple(values)

    def section(self, key: str) -> "Section":
        """A nested object, the same one whenever it is asked for; an absent one is empty."""
        if key in self._inner:
            return self._inner[key]
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        self._inner[key] = Section(value, self.place(key))
        return self._inner[key]

    def tables(self, key: str) -> list["Section"]:
        """A list of objects, in TOML [[key]] tables; an absent one is empty."""
        values = self._value(key, [])
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values):
            raise self._wrong(key, f"[[{key}]] tables", values)
        return [Section(each, self.place(f"{key}[{index}]")) for index, each in enumerate(values)]

    def unread(self) -> tuple[str, ...]:
        """Keys that nobody asked for, sorted; those of nested objects as "outer.inner"."""
        nested = [f"{key}.{name}" for key, inner in self._inner.items() for name in inner.unread()]
        return tuple(sorted([*(set(self._values) - self._asked), *nested]))

    def nulls_read(self) -> tuple[str, ...]:
        """Keys that are null and were read as a value, as `unread` spells them: a default took their place."""
        nested = [f"{key}.{name}" for key, inner in self._inner.items() for name in inner.nulls_read()]
        return tuple(sorted([*self._nulls_read, *nested]))

    def refuse_unknown(self) -> None:
        """Raise ConfigError if a key is there that nobody asked for."""
        for key in self.unread():
            raise ConfigError(f"unknown key {key!r:.60}", where=self.place(key), hint=nearest(key, self._asked))

    def _value(self, key: str, default: object) -> object:
        key = self._names.get(key, key)
        self._asked.add(key)
        if key in self._nulls:
            self._nulls_read.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise ConfigError(f"{key} is missing", where=self.place(key), hint=nearest(key, self.unread()))
        return value

    def _wrong(self, key: str, expected: str, got: object) -> ConfigError:
        try:
            shown = repr(got)[:200]
        except RecursionError:  # a file may nest deeper than can be shown
            shown = type(got).__name__
        return ConfigError(f"{key} has a wrong value", where=self.place(key), expected=expected, got=shown)


def read_record(record: type[Record], section: Section) -> Record:
    """A section as a dataclass of int, float, bool, str, enums, dataclasses, `X | Y` and `X | None`; unknown keys are
    errors."""
    assert dataclasses.is_dataclass(record), f"{record} is not a dataclass"
    hints = typing.get_type_hints(record)
    required = {
        field.name
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    values = {
        name: _read_field(hint, section, name)
        for name, hint in hints.items()
        if section.has(name) or (name in required and type(None) not in typing.get_args(hint))
    }
    section.refuse_unknown()
    absent = {name: None for name in required - set(values)}
    return record(**values, **absent)


def write_record(value: object) -> Any:
    """Inverse of `read_record` and `read_exactly`: dataclasses and mappings as objects, enums as their values, tuples
    as lists."""
    if type(value) in (str, int, float):  # most are
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: write_record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [write_record(each) for each in value]
    if isinstance(value, Mapping):
        return {key: write_record(each) for key, each in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def _read_field(hint: Any, section: Section, key: str) -> object:
    if isinstance(hint, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        hint = next((arm for arm in arms[1:] if _knows(arm, section.raw(key))), arms[0])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_record(hint, section.section(key))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _read_enum(hint, section, key)
    if typing.get_origin(hint) is tuple:
        return _read_tuple(hint, section, key)
    readers: dict[Any, Callable[[str], object]] = {
        int: section.integer,
        float: section.number,
        bool: section.boolean,
        str: section.text,
    }
    return readers[hint](key)


def _knows(record: Any, value: object) -> bool:
    """Whether a value is an object of a record's keys: of several records the one that fits is read, else the first."""
    return isinstance(value, Mapping) and set(value) <= {field.name for field in dataclasses.fields(record)}


def _read_tuple(hint: Any, section: Section, key: str) -> tuple[float, ...]:
    """tuple[int, ...] or tuple[float, ...]"""
    values, kind = section.numbers(key), typing.get_args(hint)[0]
    if kind is int and not all(isinstance(value, int) for value in values):
        raise ConfigError(
            f"{key} has a wrong value",
            where=section.place(key),
            expected="a list of whole numbers",
            got=repr(values)[:200],
        )
    return tuple(kind(value) for value in values)


def _read_enum(kind: type[enum.Enum], section: Section, key: str) -> enum.Enum:
    name = section.text(key)
    names = [str(member.value) for member in kind]
    if name not in names:
        raise ConfigError(
            f"{key} has a wrong value",
            where=section.place(key),
            expected=" or ".join(names),
            got=repr(name),
            hint=nearest(name, names),
        )
    return kind(name)
