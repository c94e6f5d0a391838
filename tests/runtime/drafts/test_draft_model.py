"""Drafts of a model: what it would say behind the known tokens, however far its cache has come with them."""

import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.configs.runtime import RuntimeConfig
from ingot.errors import UsageError
from ingot.plan import Limits
from ingot.runtime.drafts.draft_model import DraftModel, open_draft_model
from ingot.runtime.request import Request
from tests.runtime.fake_session import VOCAB, FakeSession, RepeatingSession, continued

LIMITS = Limits(max_batch_size=3, max_input_len=60, max_seq_len=64, max_num_tokens=16, max_logit_rows=8)


def model_of(session: FakeSession, vocab_size: int = VOCAB, own_vocab_size: int = VOCAB) -> DraftModel:
    plan = types.SimpleNamespace(
        vocab_size=own_vocab_size,
        tokens_per_block=4,
        caches=[types.SimpleNamespace(window=0)] * len(session.num_blocks),
    )
    engine: Any = types.SimpleNamespace(plan=plan, close=lambda: None)
    loaded: Any = types.SimpleNamespace(engine=engine, session=session, limits=LIMITS)
    return DraftModel(loaded, vocab_size)


def request_of(prompt: list[int], count: int = 40) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count)


def go_on(request: Request, tokens: list[int]) -> None:
    for token in tokens:
        request.append(token, 0.0)


@pytest.mark.parametrize("kind", [FakeSession, RepeatingSession])
@pytest.mark.parametrize("seed", range(10))
def test_drafts_follow_what_is_known(kind: type[FakeSession], seed: int) -> None:
    """Requests take part in some rounds, keep some drafts and get other tokens; the fake session checks its cache."""
    source = random.Random(seed)
    model = model_of(kind(60, 4, LIMITS))
    requests = [request_of([source.randrange(VOCAB) for _ in range(source.randint(1, 20))]) for _ in range(3)]
    for _ in range(8):
        counts = {}
        for request in source.sample(requests, source.randint(1, 3)):
            count, matched = model.match(request, source.randint(1, 6))
            assert (count >= 1) == (matched == 1) == (request.num_tokens < LIMITS.max_seq_len)
            if count:
                counts[request] = source.randint(1, count)
        for request, drafts in model.make(counts).items() if counts else ():
            known = request.tokens[: request.num_tokens].tolist()
            assert drafts.tolist() == continued(known, counts[request])
        for request in requests:
            room = min(len(request.tokens) - request.num_tokens, 5)
            kept = source.randint(0, room)
            known = request.tokens[: request.num_tokens].tolist()
            go_on(request, continued(known, kept))
            if kept < room:
                go_on(request, [source.randrange(VOCAB)])
    for request in requests:
        model.forget(request)
    assert model._blocks.num_used == 0
    assert len(model._free) == LIMITS.max_batch_size


def test_a_long_prompt_comes_in_several_steps() -> None:
    model = model_of(RepeatingSession(60, 4, LIMITS))
    request, short = request_of([7] * 50, 10), request_of([1, 2])
    for each in (request, short):
        assert model.match(each, 4) == (4, 1)
    drafts = model.make({request: 4, short: 2})
    assert drafts[request].tolist() == continued([7] * 50, 4)
    assert drafts[short].tolist() == continued([1, 2], 2)


def test_there_are_no_drafts_beyond_its_tokens_slots_and_blocks() -> None:
    model = model_of(RepeatingSession(20, 4, LIMITS))
    almost = request_of([1] * 60, 10)
    assert model.match(almost, 9) == (4, 1), "drafts end with its longest sequence"
    go_on(almost, [1] * 4)
    assert model.match(almost, 9) == (0, 0)
    first, second, third = (request_of([number] * 9) for number in range(3))
    assert [model.match(each, 4) for each in (first, second)] == [(4, 1), (0, 0)], "the blocks are few"
    model.forget(almost)
    assert [model.match(each, 4) for each in (second, third)] == [(4, 1), (4, 1)]
    assert model.match(request_of([9]), 4) == (0, 0), "all slots are taken"


def test_tokens_that_one_of_the_vocabularies_lacks_are_no_drafts() -> None:
    model = model_of(RepeatingSession(60, 4, LIMITS), vocab_size=VOCAB, own_vocab_size=50)
    assert model.match(request_of([1, 60]), 4) == (0, 0)
    for first in range(20):
        expected = continued([1, first], 6)
        model = model_of(RepeatingSession(60, 4, LIMITS), vocab_size=70)
        request = request_of([1, first])
        assert model.match(request, 6) == (6, 1)
        (drafts,) = model.make({request: 6}).values()
        valid = next((place for place, token in enumerate(expected) if token >= 70), 6)
        assert drafts.tolist() == expected[:valid]


def test_the_time_of_drafts_is_learned() -> None:
    model = model_of(RepeatingSession(60, 4, LIMITS))
    assert model.seconds(1, 5) == 0
    request = request_of([1, 2])
    for _ in range(2):  # the prompt takes other times
        assert model.seconds(1, 5) == 0
        model.match(request, 6)
        model.make({request: 6})
    assert model.seconds(1, 4) == pytest.approx(2 * model.seconds(1, 2))
    assert model.seconds(1, 2) > 0


def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no draft model(.|\n)*--draft_dir"):
        open_draft_model(tmp_path, RuntimeConfig(), 100)
