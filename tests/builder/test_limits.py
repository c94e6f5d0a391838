"""Limits: defaults are lowered and say so, given values are kept or refused."""

from typing import Any

import pytest

from ingot.builder.limits import fit_limits
from ingot.builder.positions import UNLIMITED
from ingot.configs.build import BuildConfig
from ingot.errors import UsageError


def test_defaults_of_a_large_model() -> None:
    limits, notes = fit_limits(BuildConfig(), 131072)
    assert (limits.max_batch_size, limits.max_input_len, limits.max_seq_len) == (64, 2048, 4096)
    assert (limits.max_num_tokens, limits.max_logit_rows) == (2048, 256)
    assert notes == []


def test_defaults_are_lowered_to_the_model() -> None:
    limits, notes = fit_limits(BuildConfig(), 11)
    assert (limits.max_input_len, limits.max_seq_len, limits.max_num_tokens) == (11, 12, 704)
    assert [note.split(" lowered")[0] for note in notes] == ["max_seq_len", "max_input_len", "max_num_tokens"]
    assert "the model has 11 positions" in notes[0]


def test_max_input_len_leaves_room_for_a_token() -> None:
    limits, notes = fit_limits(BuildConfig(max_seq_len=100), 512)
    assert (limits.max_seq_len, limits.max_input_len) == (100, 99)
    assert len(notes) == 1


def test_the_most_a_model_allows_can_be_asked_for() -> None:
    limits, _ = fit_limits(BuildConfig(max_seq_len=513, max_input_len=512), 512)
    assert (limits.max_seq_len, limits.max_input_len) == (513, 512)
    limits, _ = fit_limits(BuildConfig(max_seq_len=20, max_input_len=20), 512)
    assert limits.max_input_len == 20


def test_tokens_and_requests_of_a_step_are_independent() -> None:
    limits, _ = fit_limits(BuildConfig(max_num_tokens=8, max_batch_size=64), 512)
    assert (limits.max_num_tokens, limits.max_batch_size, limits.max_logit_rows) == (8, 64, 8)
    limits, _ = fit_limits(BuildConfig(max_batch_size=300), 4096)
    assert limits.max_logit_rows == 300


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"max_seq_len": 514},
            r"max_seq_len [0-9]+ is more than the model allows(.|\n)*at most 513: the model has 512 positions",
        ),
        ({"max_input_len": 513}, r"max_input_len [0-9]+ is more than the model allows(.|\n)*at most 512"),
        ({"max_output_len": 514}, r"(.|\n)*where: --max_output_len(.|\n)*at most 513(.|\n)*got: 1 \+ 514"),
        ({"max_seq_len": 50, "max_input_len": 51}, r"at most 50: max_seq_len is 50(.|\n)*raise --max_seq_len"),
    ],
)
def test_given_values_beyond_the_model_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fit_limits(BuildConfig(**given), 512)


def test_sparse_attention_is_named_as_the_reason() -> None:
    limits, notes = fit_limits(BuildConfig(), 2048, sparse_beyond=2048)
    assert (limits.max_seq_len, limits.max_input_len) == (2049, 2048)
    assert "sparse attention" in notes[0]
    with pytest.raises(UsageError, match=r"at most 2049: (.|\n)*attends to chosen tokens alone"):
        fit_limits(BuildConfig(max_seq_len=4096), 2048, sparse_beyond=2048)


def test_a_model_that_sets_no_limit() -> None:
    limits, notes = fit_limits(BuildConfig(max_seq_len=1_000_000), UNLIMITED)
    assert limits.max_seq_len == 1_000_000
    assert notes == []


def test_max_output_len_sets_max_seq_len() -> None:
    limits, _ = fit_limits(BuildConfig(max_output_len=10, max_input_len=20), 512)
    assert (limits.max_input_len, limits.max_seq_len) == (20, 30)
    limits, notes = fit_limits(BuildConfig(max_output_len=10), 512)
    assert (limits.max_input_len, limits.max_seq_len) == (503, 513)
    assert len(notes) == 1
    limits, _ = fit_limits(BuildConfig(max_output_len=3000), 131072)
    assert (limits.max_input_len, limits.max_seq_len) == (2048, 5048)
    with pytest.raises(UsageError, match="at most 513"):
        fit_limits(BuildConfig(max_output_len=513), 512)
