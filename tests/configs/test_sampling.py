"""SamplingParams: vLLM's defaults, and words for values that mean nothing."""

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot import SamplingParams
from ingot.errors import RequestError
from ingot.runtime import ModelRunner


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 1.0, 0, 1.0)
    assert params.stop_texts == ()
    assert SamplingParams(stop="x").stop_texts == ("x",)
    assert {field.name for field in dataclasses.fields(params)} == {
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "n",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "stop_token_ids",
        "bad_words",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "include_stop_str",
        "skip_special_tokens",
        "logits_processors",
        "structured_outputs",
        "thinking_token_budget",
    }


def test_values_at_the_edges() -> None:
    params = SamplingParams(max_tokens=3, min_tokens=3, top_k=-1, top_p=1, min_p=1, logit_bias={0: -math.inf})
    assert (params.min_tokens, params.top_k, params.logit_bias) == (3, -1, {0: -math.inf})


def test_the_page_has_a_row_for_every_field_and_argument() -> None:
    page = (Path(__file__).parents[2] / "docs/sampling.md").read_text()
    for field in dataclasses.fields(SamplingParams):
        default = () if field.default is dataclasses.MISSING else field.default
        assert f"| `{field.name}` ({default}) |" in page
    arguments = set(inspect.signature(ModelRunner.generate).parameters) - {"self", "others"}
    assert [name for name in arguments if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    "field",
    [
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"seed": -1},
        {"n": 0},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"presence_penalty": math.nan},
        {"frequency_penalty": "x"},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": [-1]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": [1]},
        {"logprobs": -2},
        {"prompt_logprobs": 1.5},
        {"ignore_eos": 1},
        {"logits_processors": [3]},
        {"logits_processors": 0},
        {"logits_processors": ""},
        {"stop": 3},
        {"stop": False},
        {"stop": {"a": 1}},
        {"stop": iter("a")},
        {"bad_words": {}},
        {"bad_words": 1.5},
        {"stop_token_ids": None},
        {"stop_token_ids": iter([1])},
        {"stop_token_ids": np.array([[1]])},
        {"top_p": np.array([0.5, 1])},
        {"n": 2**31},
        {"top_p": 1e-300},
        {"repetition_penalty": 1e-300},
    ],
)
def test_wrong_values_are_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        SamplingParams(**field)
