"""speculative_config: vLLM's keys, read or refused in words."""

import json
from typing import Any

import pytest

from ingot.configs.runtime import runtime_config
from ingot.configs.speculation import Speculation, read_speculation
from ingot.errors import UsageError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram"}, Speculation()),
        ({"method": "ngram", "num_speculative_tokens": 3}, Speculation(num_speculative_tokens=3)),
        ({"method": "draft_model"}, Speculation(method="draft_model")),
        ({"method": "draft_model", "model": "engine"}, Speculation(method="draft_model", model="engine")),
        ({"model": "[ngram]", "num_speculative_tokens": None}, Speculation()),
        ({"method": "ngram", "prompt_lookup_max": 1}, Speculation(prompt_lookup_min=1, prompt_lookup_max=1)),
        ({"method": "ngram", "prompt_lookup_max": 9}, Speculation(prompt_lookup_max=9)),
        ({"method": "ngram", "prompt_lookup_min": 6}, Speculation(prompt_lookup_min=6)),
        ({"method": "ngram", "prompt_lookup_min": 20}, Speculation(prompt_lookup_min=20, prompt_lookup_max=20)),
        (
            {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 5},
            Speculation(prompt_lookup_min=3, prompt_lookup_max=5),
        ),
    ],
)
def test_a_mapping_and_its_json_are_read(given: dict[str, Any], expected: Speculation) -> None:
    assert read_speculation(given) == read_speculation(json.dumps(given)) == expected
    assert runtime_config(speculative_config=given).speculation == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "not JSON"),
        ("3", "must be an object"),
        (7, "must be an object"),
        ({1: 2}, "must be an object"),
        ({}, "names no method"),
        ({"method": "eagle3"}, "no such method expected: ngram, draft_model got: 'eagle3'"),
        ({"method": ["ngram"]}, "no such method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number, 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": "7"}, "num_speculative_tokens must be a whole number"),
        ({"method": "ngram", "prompt_lookup_max": 2.0}, "prompt_lookup_max must be a whole number"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "more than prompt_lookup_max"),
        ({"method": "ngram", "model": "draft"}, "ngram takes no model"),
        ({"method": "draft_model", "model": ""}, "model must be a path"),
        ({"method": "draft_model", "model": 3}, "model must be a path"),
        ({"method": "draft_model", "prompt_lookup_max": 3}, "prompt_lookup_max is of the method ngram"),
        ({"method": "draft_model", "draft_tensor_parallel_size": 2}, "one rank"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "as many drafts as pay"),
        ({"method": "ngram", "num_speculative_token": 4}, "did you mean 'num_speculative_tokens'"),
    ],
)
def test_what_means_nothing_here_is_refused(given: object, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_speculation(given)
    assert said in " ".join(str(refused.value).split())
