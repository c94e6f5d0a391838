"""A grammar takes no text that a validator of JSON schemas calls wrong: a round of `programs.schema_judge`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.programs.schema_judge import KEYWORDS, Judge

pytest.importorskip("llguidance", reason="needs llguidance")


def other_spelling(schema: dict[str, Any], text: str) -> bool:
    """Whether grammars leave out such a spelling: escapes, exponents, a fraction of 0 or of fewer digits than that of
    multipleOf, keys in another order."""
    value = json.loads(text)
    plain = json.dumps(value, ensure_ascii=False)
    digits = "multipleOf" in schema and "." in text
    return digits or "\\u" in text or plain != text or ".0" in text or (isinstance(value, dict) and len(value) > 1)


@pytest.mark.slow
def test_what_is_taken_is_valid(tmp_path: Path) -> None:
    judge = Judge(tmp_path)
    judge.round(11)
    assert set(judge.groups) > set(KEYWORDS) | {"anyOf", "oneOf", "allOf", "not", "if", "$ref", "type", "none"}
    assert sum(each.schemas for each in judge.groups.values()) > 190
    for group, found in judge.groups.items():
        assert found.wrong == [], group
        assert [pair for pair in found.missed if not other_spelling(*pair)] == [], group
        assert found.taken or found.refused == found.schemas or group == "allOf"
