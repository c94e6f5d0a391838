"""generation_config.json: which of its settings bear on a request, and which are told as not followed."""

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.configs.generation import GenerationDefaults, read_generation_defaults
from ingot.configs.read import Section
from ingot.configs.token_ids import TokenIds, check_vocabulary, token_ids
from ingot.errors import ConfigError

FILE = {"temperature": 0.5, "top_k": 20, "top_p": 0.75}


def defaults(folder: Path, **values: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder)


def test_the_file_counts_where_the_request_is_silent(tmp_path: Path) -> None:
    sampling = defaults(tmp_path, do_sample=True, **FILE)
    assert sampling.resolve(None, None, None) == (0.5, 20, 0.75)
    assert sampling.resolve(0.0, 0, 1.0) == (0.0, 0, 1.0)
    assert sampling.resolve(2.0, None, None) == (2.0, 20, 0.75)
    assert sampling.resolve(None, 3, None) == (0.5, 3, 0.75)
    assert sampling.resolve(None, None, 0.25) == (0.5, 20, 0.25)


def test_without_sampling_only_a_request_samples(tmp_path: Path) -> None:
    greedy = defaults(tmp_path, **FILE)
    assert greedy.resolve(None, None, None) == (0.0, 0, 1.0)
    assert greedy.resolve(None, 3, None) == (0.5, 3, 0.75)
    assert GenerationDefaults().resolve(None, None, 0.5) == (1.0, 0, 0.5)


def test_only_what_would_change_tokens_is_told(tmp_path: Path) -> None:
    neutral = {"typical_p": 1.0, "num_beams": 1, "bad_words_ids": None, "min_length": 0}
    assert defaults(tmp_path, **neutral).not_followed == ()
    assert defaults(tmp_path, **{**neutral, "num_beams": 4}).not_followed == ("num_beams=4",)
    assert defaults(tmp_path, repetition_penalty=1.5, min_p=0.125).others == {"repetition_penalty": 1.5, "min_p": 0.125}


def test_a_value_that_no_request_may_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        defaults(tmp_path, top_p=1.5)
    assert str(raised.value.where).endswith("generation_config.json:top_p")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, TokenIds(eos=(), bos=None, pad=None)),
        ({"eos_token_id": -1, "bos_token_id": -1}, TokenIds(eos=(), bos=None, pad=None)),
        ({"eos_token_id": [4, 2], "bos_token_id": 0, "pad_token_id": 9}, TokenIds(eos=(4, 2), bos=0, pad=9)),
    ],
)
def test_tokens_that_begin_and_end_texts(values: dict[str, Any], expected: TokenIds) -> None:
    found = token_ids(Section(values, "f"))
    assert found == expected
    check_vocabulary(found, 5, "f")


@pytest.mark.parametrize("values", [{"eos_token_id": [1, 5]}, {"bos_token_id": 5}])
def test_tokens_of_no_vocabulary(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at most 4"):
        check_vocabulary(token_ids(Section(values, "f")), 5, "f")
