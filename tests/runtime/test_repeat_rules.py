"""Runners whose session goes on by itself under rules that depend on what was drawn: the bits of single steps."""

import random
from typing import Any

import pytest

from ingot.configs.sampling import SamplingParams
from ingot.plugins.cpu.session import CpuSession
from ingot.plugins.registry import find_target
from ingot.runtime import step_loop
from tests.runtime.repeating import steps_of_calls
from tests.runtime.tiny_engine import make_runner, open_session, poisoned_runner
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model

pytestmark = pytest.mark.native

PROMPTS = 6


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps count as short however loaded the machine is."""
    monkeypatch.setattr(step_loop, "_LONG_STEP", 60.0)
    monkeypatch.setattr(step_loop, "_CROSSING_SECONDS", 60.0)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return make_model(find_target("cpu"))


RULED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.2, "temperature": 0.9},
    {"bad_words_list": [[7, 9], [3], [12, 30, 4], *[[first, 11] for first in range(VOCAB)]]},
    {"min_tokens": 25, "end_id": 5, "temperature": 1.0},
    {"min_tokens": 9, "stop_token_ids": range(0, VOCAB, 4), "temperature": 1.0},
    {"stop_token_ids": [8, 9], "temperature": 1.2},
    {"stop_words_list": [[4, 5], [11, 2, 3], [40]], "temperature": 1.5},
    {"logprobs": 3, "prompt_logprobs": 1, "temperature": 0.7},
    {"logprobs": -1},
    {"logprobs": 0, "repetition_penalty": 0.9, "logit_bias": {3: 2.0}, "min_p": 0.1, "temperature": 1.0},
    {},
]


def _one(fields: dict[str, Any], place: int) -> dict[str, Any]:
    """Arguments of `generate`."""
    fields = dict(fields)
    own: dict[str, Any] = {"end_id": fields.pop("end_id", -1)}
    own |= {name: [fields.pop(name)] * PROMPTS for name in ("stop_words_list", "bad_words_list") if name in fields}
    params = SamplingParams(**{"max_tokens": 34, "temperature": 0.0, "seed": place, **fields})
    return {**own, "sampling_config": params}


def test_every_rule_repeats_in_the_runner(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = steps_of_calls(monkeypatch)
    monkeypatch.setattr(CpuSession, "most_steps", 5)  # so that rules go on from crossing to crossing
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(PROMPTS)]
    for place, fields in enumerate(RULED):
        arguments = _one(fields, place)
        with poisoned_runner(model, find_target("cpu"), 200) as runner:  # it runs one step at a time
            one = runner.generate(prompts, output_log_probs=True, return_dict=True, **arguments)
        calls.clear()
        with make_runner(model, open_session(model, find_target("cpu"), 200)) as runner:
            several = runner.generate(prompts, output_log_probs=True, return_dict=True, **arguments)
        assert max(calls) > 1, fields
        for key in ("output_ids", "log_probs", "sequence_lengths"):
            assert several[key].tobytes() == one[key].tobytes(), fields
        assert several.get("logprobs") == one.get("logprobs")
        assert several.get("prompt_logprobs") == one.get("prompt_logprobs")
    assert caplog.records == [], "no step failed and was tried again"


@pytest.mark.parametrize("begun", [1, 2])
@pytest.mark.parametrize("kind", ["stop", "bad"])
def test_words_that_begin_before_several_steps_run_together(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: str, begun: int
) -> None:
    """The prefill draws one token, a single step the next; then runs of two, three and three steps follow."""
    calls = steps_of_calls(monkeypatch)
    monkeypatch.setattr(CpuSession, "most_steps", 3)
    with make_runner(model, open_session(model, find_target("cpu"), 40)) as runner:
        free = runner.generate([[1, 2]], max_new_tokens=20, end_id=-1)[0, 0, 2:].tolist()
        assert calls[:3] == [2, 3, 3]
        for crossing in (4, 7):
            word = free[crossing - begun : crossing + 2]
            calls.clear()
            if kind == "stop":
                got = runner.generate([[1, 2]], max_new_tokens=20, end_id=-1, stop_words_list=[[word]])
                end = next(n for n in range(len(word), 21) if free[n - len(word) : n] == word)
                assert got[0, 0, 2:].tolist() == free[:end]
            else:
                got = runner.generate([[1, 2]], max_new_tokens=20, end_id=-1, bad_words_list=[[word]])
                tokens = got[0, 0, 2:].tolist()
                assert tokens != free
                assert not any(tokens[n : n + len(word)] == word for n in range(20))
            assert max(calls) > 1
