"""Structured outputs of a real model, in the company of requests that have none, and through preemptions."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ingot import LLM, SamplingParams

pytest.importorskip("llguidance", reason="needs llguidance")
pytestmark = pytest.mark.native

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}
LETTERS = {"regex": "[a-f]{230}"}
FORMS: tuple[dict[str, Any] | None, ...] = ({"json": SCHEMA}, LETTERS, None)
COUNT, BLOCK_BYTES = 24, 1 << 16


def answers(engine: Path, forms: tuple[dict[str, Any] | None, ...], **options: Any) -> tuple[list[str], int]:
    """(texts, preemptions) of requests that take turns with the forms; every second one is greedy."""
    llm = LLM(engine, **options)
    asked = [
        SamplingParams(max_tokens=240, temperature=0.8 * (i % 2), seed=i, structured_outputs=forms[i % len(forms)])
        for i in range(COUNT)
    ]
    found = llm.generate([f"Once upon a time {i}" for i in range(COUNT)], asked, use_tqdm=False)
    return [each.outputs[0].text for each in found], llm.runner.stats()["preemptions"]


@pytest.mark.slow
def test_forms_hold_in_company_and_through_preemptions(shipped_engine: Path) -> None:
    calm, none = answers(shipped_engine, FORMS)
    pressed, preemptions = answers(shipped_engine, FORMS, kv_cache_memory=16 * BLOCK_BYTES)
    assert none == 0
    assert preemptions > 0, "16 blocks hold fewer tokens than the requests have"
    assert pressed == calm
    for text in calm[0::3]:
        assert 0 <= json.loads(text)["n"] <= 99
    assert all(re.fullmatch(LETTERS["regex"], text) for text in calm[1::3])
    free, _ = answers(shipped_engine, (None,))
    assert free[2::3] == calm[2::3], "requests without a form do not notice the others"
