"""Every sampling parameter through the whole loop, on `ref` and on the native session, against plain formulae."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.plan import Limits
from ingot.plugins.registry import find_target
from ingot.runtime import ModelRunner
from ingot.runtime.logprobs import Logprob
from ingot.step_io import Ahead, Float32, StepBatch, StepResult
from tests.runtime.tiny_engine import make_runner, open_session
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model
from tests.runtime.wrapped_session import WrappedSession

PROMPT = [3, 1, 4, 1, 5]
COUNT = 10


@pytest.fixture(scope="module", params=["ref", pytest.param("cpu", marks=pytest.mark.native)])
def model(request: pytest.FixtureRequest) -> TinyModel:
    target = find_target(request.param)
    return make_model(None if target.name == "ref" else target)


def open_runner(model: TinyModel, request: pytest.FixtureRequest, limits: Limits | None = None) -> ModelRunner:
    target = find_target(request.node.callspec.params["model"])
    return make_runner(model, open_session(model, target, 60), limits)


@pytest.fixture
def runner(model: TinyModel, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    with open_runner(model, request) as runner:
        yield runner


def generated(runner: ModelRunner, prompt: list[int] = PROMPT, **arguments: Any) -> list[int]:
    ids = runner.generate([prompt], max_new_tokens=COUNT, **{"end_id": -1, **arguments})
    return [int(token) for token in ids[0, 0, len(prompt) :]]


def configured(runner: ModelRunner, end_id: int = -1, **fields: Any) -> dict[str, Any]:
    params = SamplingParams(**{"max_tokens": COUNT, "temperature": 0.0, **fields})
    out: dict[str, Any] = runner.generate([PROMPT], sampling_config=params, end_id=end_id, return_dict=True)
    return out


def tokens_of(out: dict[str, Any], sequence: int = 0) -> list[int]:
    length = out["sequence_lengths"][0, sequence]
    return [int(token) for token in out["output_ids"][0, sequence, len(PROMPT) : length]]


def log_softmax(row: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    every: npt.NDArray[np.float64] = row - row.max() - np.log(np.exp(row - row.max()).sum())
    return every


def greedy(model: TinyModel, allowed: Callable[[list[int], int], bool]) -> list[int]:
    """The most likely of the allowed tokens again and again; allowed(generated tokens, next token)."""
    tokens = list(PROMPT)
    for _ in range(COUNT):
        order = np.argsort(-model.logits(tokens)[-1]).tolist()
        tokens.append(next(token for token in order if allowed(tokens[len(PROMPT) :], token)))
    return tokens[len(PROMPT) :]


def penalised(model: TinyModel, repetition: float, presence: float, frequency: float) -> list[int]:
    """Greedy with penalties, straight from the formulae."""
    tokens = list(PROMPT)
    for _ in range(COUNT):
        row = model.logits(tokens)[-1]
        for token in set(tokens):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token in set(tokens[len(PROMPT) :]):
            row[token] -= presence + frequency * tokens[len(PROMPT) :].count(token)
        tokens.append(int(row.argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("penalties", [(1.6, 0.0, 0.0), (1.0, 2.5, 0.0), (1.0, 0.0, 1.5), (0.8, -0.5, 0.7)])
def test_penalties(runner: ModelRunner, model: TinyModel, penalties: tuple[float, float, float]) -> None:
    repetition, presence, frequency = penalties
    tokens = generated(runner, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    assert tokens == penalised(model, *penalties)
    assert tokens != generated(runner) or penalties[0] < 1


def ends_in_none(words: list[list[int]], before: list[int], token: int) -> bool:
    return all([*before, token][-len(word) :] != word for word in words)


def test_bad_words(runner: ModelRunner, model: TinyModel) -> None:
    free = generated(runner)
    assert free == greedy(model, lambda before, token: True)
    for words in ([free[:1]], [free[:2]], [free[1:4], free[4:5]]):
        expected = greedy(model, partial(ends_in_none, words))
        assert generated(runner, bad_words_list=[words]) == expected
        assert expected != free


def test_logit_bias(runner: ModelRunner, model: TinyModel) -> None:
    free = generated(runner)
    assert tokens_of(configured(runner, logit_bias={7: 100.0})) == [7] * COUNT
    expected = greedy(model, lambda before, token: token != free[0])
    assert tokens_of(configured(runner, logit_bias={free[0]: -math.inf})) == expected


def test_end_tokens_wait_for_the_least_length(runner: ModelRunner, model: TinyModel) -> None:
    free = generated(runner)
    end = free[2]
    assert generated(runner, end_id=[end]) == free[: free.index(end) + 1]
    unending = greedy(model, lambda before, token: token != end or len(before) >= 6)
    expected = unending[: unending.index(end) + 1] if end in unending else unending
    assert generated(runner, end_id=[end], min_length=6) == expected
    ends = list(range(0, VOCAB, 2))
    unending = greedy(model, lambda before, token: token not in ends or len(before) >= 6)
    first = next(place for place, token in enumerate(unending) if token in ends)
    assert first < COUNT - 1, "the ban is over before the last token"
    assert generated(runner, end_id=ends, min_length=6)[: first + 1] == unending[: first + 1]
    words = generated(runner, stop_words_list=[[free[:1], free[4:5]]], min_length=5)
    assert words == free[: next(n for n in range(5, COUNT + 1) if free[n - 1] in (free[0], free[4]))]


def test_rules_that_leave_no_token_fail_their_request_alone(runner: ModelRunner) -> None:
    nothing = SamplingParams(max_tokens=3, temperature=0, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    with pytest.raises(RequestError, match="leave no token"):
        runner.generate([PROMPT], sampling_config=nothing)
    with pytest.raises(RequestError, match="leave no token"):
        runner.generate(
            [PROMPT], sampling_config=dataclasses.replace(nothing, logits_processors=[lambda logits: logits])
        )
    assert runner.stats()["blocks_used"] == 0


def test_seeds_do_not_depend_on_the_batch(runner: ModelRunner) -> None:
    rules: dict[str, Any] = {"temperature": 1.3, "top_p": 0.97, "min_p": 0.01, "presence_penalty": 0.3}
    alone = tokens_of(configured(runner, seed=5, **rules))
    params = SamplingParams(max_tokens=COUNT, seed=5, n=3, **rules)
    company = runner.generate([[9, 9], PROMPT, [7]], sampling_config=params, end_id=-1)
    assert company[1, 0, len(PROMPT) : len(PROMPT) + COUNT].tolist() == alone
    assert company[1, 1, len(PROMPT) : len(PROMPT) + COUNT].tolist() == tokens_of(configured(runner, seed=6, **rules))
    assert len({tuple(row) for row in company[1].tolist()}) == 3


@pytest.mark.parametrize("chunk", [3, 64])
def test_logprobs(model: TinyModel, request: pytest.FixtureRequest, chunk: int) -> None:
    """Of generated and prompt tokens, in chunks too, against log-softmax of the model's formulae."""
    limits = dataclasses.replace(model.plan.limits, max_num_tokens=chunk)
    with open_runner(model, request, limits) as runner:
        out = configured(runner, temperature=1.5, seed=3, logprobs=4, prompt_logprobs=2, presence_penalty=1.0)
        zero = configured(runner, temperature=1.5, seed=3, logprobs=0, presence_penalty=1.0)
        whole = configured(runner, logprobs=-1, prompt_logprobs=-1)
    tokens = PROMPT + tokens_of(out)
    every = [log_softmax(row) for row in model.logits(tokens)]
    assert out["prompt_logprobs"][0][0] is None
    tables = [*out["prompt_logprobs"][0][1:], *out["logprobs"][0][0]]
    assert len(tables) == len(tokens) - 1
    for place, table in enumerate(tables):
        actual, row = tokens[place + 1], every[place]
        order = np.argsort(-row, kind="stable").tolist()
        wanted = 2 if place + 1 < len(PROMPT) else 4
        assert next(iter(table)) == actual
        assert set(table) == {actual, *order[:wanted]}
        for token, entry in table.items():
            assert isinstance(entry, Logprob)
            assert entry.logprob == pytest.approx(row[token], abs=2e-4)
            assert entry.rank == 1 + order.index(token)
            assert entry.decoded is None
    assert [list(table) for table in zero["logprobs"][0][0]] == [[token] for token in tokens_of(out)]
    assert {len(table) for table in [*whole["prompt_logprobs"][0][1:], *whole["logprobs"][0][0]]} == {VOCAB}


def test_all_logits_in_chunks(model: TinyModel, request: pytest.FixtureRequest) -> None:
    outs = []
    for chunk in (2, 64):
        limits = dataclasses.replace(model.plan.limits, max_num_tokens=chunk)
        with open_runner(model, request, limits) as runner:
            outs.append(
                runner.generate(
                    [PROMPT],
                    max_new_tokens=3,
                    end_id=-1,
                    return_dict=True,
                    output_generation_logits=True,
                    output_context_logits=True,
                )
            )
    for key in ("generation_logits", "context_logits"):
        np.testing.assert_array_equal(outs[0][key], outs[1][key])
    assert outs[0]["generation_logits"][0, 0].argmax(-1).tolist() == outs[0]["output_ids"][0, 0, len(PROMPT) :].tolist()


def test_prompt_logprobs_survive_preemption(model: TinyModel, request: pytest.FixtureRequest) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, prompt_logprobs=1, logprobs=1)
    prompts = [[n, 2, 3, 4, 5, 6, 7, 8, 9] for n in range(5)]
    target = find_target(request.node.callspec.params["model"])
    with make_runner(model, open_session(model, target, 60)) as runner:
        calm = runner.generate(prompts, sampling_config=params, end_id=-1, return_dict=True)
    with make_runner(model, open_session(model, target, 8)) as runner:
        tight = runner.generate(prompts, sampling_config=params, end_id=-1, return_dict=True)
        assert runner.stats()["preemptions"] > 0
    assert tight["prompt_logprobs"] == calm["prompt_logprobs"]
    assert tight["logprobs"] == calm["logprobs"]
    assert {len(tables) for tables in calm["prompt_logprobs"]} == {9}


def test_prompt_logprobs_come_with_several_completions(runner: ModelRunner) -> None:
    alone, company = (configured(runner, prompt_logprobs=2, logprobs=1, temperature=1.0, seed=3, n=n) for n in (1, 3))
    assert company["prompt_logprobs"] == alone["prompt_logprobs"]
    assert len(company["prompt_logprobs"][0]) == len(PROMPT)
    assert [len(tables) for tables in company["logprobs"][0]] == [COUNT] * 3


def test_prompt_logits_that_are_no_numbers_fail_their_request(model: TinyModel, request: pytest.FixtureRequest) -> None:
    class Sick(WrappedSession):
        """Everything is a number but the probability of the prompt's second token."""

        def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
            result = super().run(batch, ahead)
            log_probs = result.log_probs.copy()
            if batch.known is not None:
                log_probs[:, len(batch.draws)] = np.nan
            return dataclasses.replace(result, log_probs=log_probs)

    target = find_target(request.node.callspec.params["model"])
    with make_runner(model, Sick(open_session(model, target, 60))) as runner:
        with pytest.raises(RequestError, match="not finite"):
            configured(runner, prompt_logprobs=0)
        assert len(tokens_of(configured(runner, logprobs=0))) == COUNT


def test_arguments_that_have_defaults_are_the_processors_own(runner: ModelRunner) -> None:
    def one(logits: Float32, by: float = 5.0, *, token: int = 7) -> Float32:
        logits[token] += by
        return logits

    def two(output: list[int], logits: Float32, prompt: str = "mine") -> Float32:
        assert prompt == "mine"
        assert isinstance(output, list)
        return logits

    def three(prompt: list[int], output: list[int], logits: Float32, scale: float = 1.0) -> Float32:
        assert (prompt, scale) == (PROMPT, 1.0)
        return logits

    def any_number(*arguments: Any) -> Float32:
        prompt, _, logits = arguments
        assert prompt == PROMPT
        row: Float32 = logits
        return row

    def one_and_more(logits: Float32, *more: Any) -> Float32:
        assert more == ()
        return logits

    class Silent:
        """As callables of some compiled modules: it does not say what it takes."""

        __signature__ = "none"

        def __call__(self, output: list[int], logits: Float32) -> Float32:
            return logits

    processors = [one, two, three, any_number, one_and_more, Silent(), partial(one, by=0.0)]
    tokens = tokens_of(configured(runner, logits_processors=processors))
    assert tokens == tokens_of(configured(runner, logit_bias={7: 5.0}))
    with pytest.raises(RequestError, match="wrong number of arguments"):
        configured(runner, logits_processors=[lambda a, b, c, d, e=1: a])


def test_logits_processors(runner: ModelRunner) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    free = generated(runner)

    def forbid(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        logits[free[1]] = -np.inf
        return logits

    def watch(prompt: list[int], output: list[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        assert logits.dtype == np.float32
        assert logits[free[1]] == -np.inf
        seen.append((prompt, output))
        return logits

    def third(output: list[int], logits: npt.NDArray[np.float32]) -> Any:
        return logits if len(output) != 2 else np.where(np.arange(VOCAB) == 11, 0.0, -np.inf)

    out = configured(runner, logits_processors=[forbid, watch, third], logprobs=1)
    tokens = tokens_of(out)
    assert tokens == tokens_of(configured(runner, logit_bias={free[1]: -math.inf}))[:2] + tokens[2:]
    assert tokens[2] == 11
    assert seen == [(PROMPT, tokens[:n]) for n in range(COUNT)]
    raw = configured(runner, logprobs=VOCAB, logit_bias=dict.fromkeys([free[1]], -math.inf), max_tokens=2)
    assert out["logprobs"][0][0][1][tokens[1]] == raw["logprobs"][0][0][1][tokens[1]]


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda logits: 1 / 0, "processor failed"),
        (lambda logits: logits[1:], "another shape"),
        (lambda logits: logits * np.nan, "left no token"),
        (lambda logits: logits - np.inf, "left no token"),
        (lambda logits: None, "another shape|processor failed"),
    ],
)
def test_a_failing_processor_fails_its_request_alone(runner: ModelRunner, processor: Any, words: str) -> None:
    params = SamplingParams(max_tokens=5, logits_processors=[processor])
    stream = runner.generate([PROMPT], max_new_tokens=COUNT, end_id=-1, streaming=True)
    next(stream)  # another request runs beside it
    with pytest.raises(RequestError, match=words):
        runner.generate([PROMPT], sampling_config=params)
    *_, last = stream
    assert last[0, 0, len(PROMPT) :].tolist() == generated(runner)
