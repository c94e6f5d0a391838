"""One thing is asked for, and what cannot be read is refused."""

from typing import Any

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"json_object": False},
        {"regex": ""},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "ab"},
        {"regex": "a", "disable_any_whitespace": True},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
        {"jsn": {}},
    ],
)
def test_what_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutputs(**wrong)
    with pytest.raises(RequestError):
        SamplingParams(structured_outputs=wrong)


def test_a_dictionary_stands_for_its_fields() -> None:
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == StructuredOutputs(regex="a+")


def test_json_object_is_a_schema_and_texts_are_parsed() -> None:
    assert StructuredOutputs(json_object=True).schema == {"type": "object"}
    assert StructuredOutputs(json='{"type": "null"}').schema == {"type": "null"}
    with pytest.raises(RequestError, match="is not JSON"):
        _ = StructuredOutputs(json="{").schema
