"""Trained models, end to end: they do what they were trained for, and their numbers are those of float64."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from ingot.runtime.model_runner import ModelRunner
from tests.e2e.command import ingot
from tests.e2e.float64_llama import Float64Llama

pytestmark = pytest.mark.shared


def engine_of(model: Path, work: Path, *options: object) -> Path:
    """Convert and build; the engine's directory."""
    ingot("convert", "--model_dir", model, "--output_dir", work / "checkpoint").succeeds()
    ingot("build", "--checkpoint_dir", work / "checkpoint", "--output_dir", work / "engine", *options).succeeds()
    return work / "engine"


@pytest.fixture(scope="module")
def stories(shared: Path) -> list[list[int]]:
    """The first 100 stories as the model saw them: BOS, text, at most 256 tokens."""
    tokenizer = Tokenizer.from_file(str(shared / "models/stories260K/tokenizer.json"))
    texts = json.loads((shared / "data/text/tinystories_1000.json").read_text())[:100]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[1, *ids][:256] for ids in encoded]


@pytest.fixture(scope="module", params=["f32", "bf16"])
def stories_engine(request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp(request.param)
    return engine_of(shared / "models/stories260K", work, "--precision", request.param)


@pytest.mark.parametrize(("target", "count"), [("cpu", 729), ("ref", 81)])
def test_gpt_nano_sorts_every_input(target: str, count: int, shared: Path, tmp_path: Path) -> None:
    engine = engine_of(shared / "models/gpt-nano-sort", tmp_path, "--target", target)
    inputs = [list(letters) for letters in itertools.product(range(3), repeat=6)]
    order = np.random.default_rng(0).permutation(len(inputs))[:count]
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate([inputs[i] for i in order], max_new_tokens=6, end_id=-1)
        assert max(decode for _, decode in runner.step_log()) == 64
    right = sum(out[row, 0, 6:].tolist() == sorted(inputs[i]) for row, i in enumerate(order))
    assert right == count


def test_greedy_tokens_are_those_of_float64(stories_engine: Path, stories: list[list[int]], shared: Path) -> None:
    prompts = [story[: 4 + index % 5] for index, story in enumerate(stories[:48])]
    expected, margin = float64_greedy(shared / "models/stories260K", prompts, 48)
    with ModelRunner.from_dir(stories_engine) as runner:
        out = runner.generate(prompts, max_new_tokens=48, end_id=-1)
    got = [row[0, len(prompt) : len(prompt) + 48].tolist() for row, prompt in zip(out, prompts, strict=True)]
    if json.loads((stories_engine / "config.json").read_text())["precision"] == "f32":
        assert margin > 1e-4, "the prompts leave float32 no room"
        assert got == expected
    else:  # rounded weights may cross a small margin, never at once
        assert [tokens[0] for tokens in got] == [tokens[0] for tokens in expected]


def float64_greedy(model: Path, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], float]:
    """(tokens of each prompt, the smallest lead of a best token over the second)."""
    made, margin = [], np.inf
    for length in sorted({len(prompt) for prompt in prompts}):
        llama = Float64Llama(model)
        same = np.array([prompt for prompt in prompts if len(prompt) == length])
        for column in same.T:
            logits = llama.step(column)
        tokens = []
        for _ in range(count):
            best = np.sort(logits, axis=1)
            margin = min(margin, float((best[:, -1] - best[:, -2]).min()))
            tokens.append(logits.argmax(axis=1))
            logits = llama.step(tokens[-1])
        made += [(prompt, own) for prompt, own in zip(same.tolist(), np.stack(tokens, axis=1).tolist(), strict=True)]
    by_prompt = {tuple(prompt): own for prompt, own in made}
    return [by_prompt[tuple(prompt)] for prompt in prompts], margin


def test_perplexity(stories_engine: Path, stories: list[list[int]]) -> None:
    with ModelRunner.from_dir(stories_engine) as runner:
        out = runner.generate(stories, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    losses = np.concatenate([nll(logits, ids) for logits, ids in zip(out["context_logits"], stories, strict=True)])
    assert len(losses) == 25_367
    tolerance = 0.005 if json.loads((stories_engine / "config.json").read_text())["precision"] == "f32" else 0.01
    assert np.exp(losses.mean()) == pytest.approx(4.948, abs=tolerance)


def nll(logits: npt.NDArray[np.float32], ids: Sequence[int]) -> npt.NDArray[np.float64]:
    """Negative log-probabilities of ids[1:], each under the logits of the token before."""
    rows = logits[:-1].astype(np.float64)
    rows = rows - rows.max(axis=1, keepdims=True)
    losses: npt.NDArray[np.float64] = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(len(rows)), list(ids[1:])]
    return losses
