"""A fake model behind an EngineLLM, which several files test."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.runtime.llm import EngineLLM
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.fake_session import VOCAB, FakeSession
from tests.runtime.tiny_engine import make_runner
from tests.runtime.tiny_plan import make_model


@pytest.fixture
def session() -> FakeSession:
    """What `llm` runs on."""
    plan = make_model().plan
    return FakeSession(100, plan.tokens_per_block, plan.limits)


@pytest.fixture
def llm(session: FakeSession, tmp_path: Path) -> Iterator[EngineLLM]:
    """A token of a byte, and texts that the fake session continues."""
    model = make_model()
    model = dataclasses.replace(model, plan=dataclasses.replace(model.plan, vocab_size=VOCAB))
    with EngineLLM(make_runner(model, session), byte_tokenizer(tmp_path, VOCAB)) as llm:
        yield llm
