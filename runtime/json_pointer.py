"""References inside a JSON document."""

from collections.abc import Mapping
from typing import Any

_VALUES = ("const", "enum", "default", "examples")  # what stands there is no schema


def resolved(reference: str, root: object) -> object:
    """What `#/...` refers to; None: nothing."""
    found = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def moved(schema: Any, place: str) -> Any:
    """A schema whose references go to `place`, where the document that they are of stands in another one."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        else value
        if key in _VALUES
        else moved(value, place)
        for key, value in schema.items()
    }
