"""References inside a JSON document, and in one that holds it."""

import pytest

from ingot.runtime.json_pointer import moved, resolved

ROOT = {"$defs": {"a/b": {"c~": 1}}, "x": {"$ref": "#/$defs/a"}}


@pytest.mark.parametrize(
    ("reference", "expected"),
    [("#", ROOT), ("#/$defs/a~1b", {"c~": 1}), ("#/$defs/a~1b/c~0", 1), ("#/x/y", None), ("#/$defs/a~1b/c~0/d", None)],
)
def test_what_a_reference_finds(reference: str, expected: object) -> None:
    assert resolved(reference, ROOT) == expected


def test_references_go_along_and_values_stay() -> None:
    schema = {
        "a": [{"$ref": "#"}, {"$ref": "#/x"}, {"$ref": "http://y"}],
        "const": {"$ref": "#"},
        "$ref": {"$ref": "#z"},
    }
    assert moved(schema, "/p") == {
        "a": [{"$ref": "#/p"}, {"$ref": "#/p/x"}, {"$ref": "http://y"}],
        "const": {"$ref": "#"},
        "$ref": {"$ref": "#z"},
    }
