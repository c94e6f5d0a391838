"""Which part of a JSON schema the library refuses: it does not say so itself."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties")
_TRIES = 64  # parts that are tried: each takes about a millisecond
_SECONDS = 1.0  # for all of them


def find_refused(schema: Mapping[str, Any], problem: Callable[[str], str | None]) -> str:
    """The JSON path, "$" for the whole, of the deepest part that is refused by itself.

    problem  text of a schema → why it is refused, or None
    """
    path, part, tries, end = "$", schema, 0, time.monotonic() + _SECONDS
    defs = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    while True:
        for name, child in _parts(part):
            tries += 1
            if tries > _TRIES or time.monotonic() > end:
                return path
            if problem(json.dumps({**defs, **child} if _refers(child) else child)) is not None:
                path, part = path + name, child
                break
        else:
            return path


def _refers(schema: Mapping[str, Any]) -> bool:
    """Whether anything in it may refer to the definitions of the whole."""
    return '"$ref"' in json.dumps(schema)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in _BY_NAME:
        if isinstance(schema.get(key), Mapping):
            yield from ((f".{key}.{name}", each) for name, each in schema[key].items() if isinstance(each, Mapping))
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f".{key}[{n}]", each) for n, each in enumerate(schema[key]) if isinstance(each, Mapping))
    yield from ((f".{key}", schema[key]) for key in _SINGLE if isinstance(schema.get(key), Mapping))
