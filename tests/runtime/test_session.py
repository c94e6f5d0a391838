"""Limits of a runtime config lower those of the engine, and never raise them."""

import dataclasses

import pytest

from ingot.configs.runtime import RuntimeConfig
from ingot.errors import UsageError
from ingot.plan import Limits
from ingot.runtime.session import lowered

BUILT = Limits(max_batch_size=8, max_input_len=48, max_seq_len=65, max_num_tokens=96, max_logit_rows=8)


def test_what_is_not_said_stays() -> None:
    assert lowered(BUILT, RuntimeConfig()) == BUILT
    said = RuntimeConfig(max_batch_size=8, max_num_tokens=96, max_seq_len=65)
    assert lowered(BUILT, said) == BUILT, "the engine's own limits may be said"


def test_prompts_are_no_longer_than_sequences() -> None:
    expected = dataclasses.replace(BUILT, max_seq_len=20, max_input_len=20)
    assert lowered(BUILT, RuntimeConfig(max_seq_len=20)) == expected
    assert lowered(BUILT, RuntimeConfig(max_seq_len=60)).max_input_len == 48


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens", "max_seq_len"])
def test_more_than_was_built_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is beyond"):
        lowered(BUILT, dataclasses.replace(RuntimeConfig(), **{name: getattr(BUILT, name) + 1}))
