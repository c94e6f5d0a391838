"""Trained models, end to end: they do what they were trained for, and their numbers are those of float64."""

import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from ingot.runtime.model_runner import ModelRunner
from tests.e2e.command import ingot
from tests.oracle.llama_float64 import LlamaFloat64
from tests.spanning import often

pytestmark = pytest.mark.shared

LogProbs = npt.NDArray[np.float64]  # [tokens, vocab]


def engine_of(model: Path, work: Path, *options: object) -> Path:
    """Convert and build; the engine's directory."""
    ingot("convert", "--model_dir", model, "--output_dir", work / "checkpoint").succeeds()
    build = ("build", "--checkpoint_dir", work / "checkpoint", "--output_dir", work / "engine", "--no_autotune")
    ingot(*build, *options).succeeds()
    return work / "engine"


@pytest.fixture(scope="module")
def stories(shared: Path) -> list[list[int]]:
    """The first 100 stories as the model saw them: BOS, text, at most 256 tokens."""
    tokenizer = Tokenizer.from_file(str(shared / "models/stories260K/tokenizer.json"))
    texts = json.loads((shared / "data/text/tinystories_1000.json").read_text())[:100]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [[1, *ids][:256] for ids in encoded]


@pytest.fixture(scope="module")
def exact(shared: Path, stories: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> LogProbs:
    """Of the f32 engine."""
    engine = engine_of(shared / "models/stories260K", tmp_path_factory.mktemp("exact"), "--precision", "f32")
    return log_probs(engine, stories)


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
    length, count = 6, 48
    prompts = [story[:length] for story in stories[:48]]
    with ModelRunner.from_dir(stories_engine) as runner:
        sequences = runner.generate(prompts, max_new_tokens=count, end_id=-1)[:, 0].astype(np.int64)
    assert sequences.shape == (48, length + count)
    logits = LlamaFloat64(shared / "models/stories260K").logits(sequences[:, :-1])[:, length - 1 :]
    second, first = np.moveaxis(np.partition(logits, -2)[..., -2:], -1, 0)
    assert (first - second).min() > 1e-4, "the prompts leave float32 no room"
    wrong = np.argwhere(logits.argmax(axis=-1) != sequences[:, length:])  # by induction: greedy if there is none
    if json.loads((stories_engine / "config.json").read_text())["precision"] == "f32":
        assert len(wrong) == 0
    else:  # rounded weights cross small margins, and a sequence that left the path stays away from it
        assert len(wrong) < 0.05 * 48 * count


# Of the stories: perplexity at most, KL divergence from f32 at most.
LOSSES = {
    "bf16": (4.958, 3e-4),
    "w8": (4.968, 2e-3),
    "w4g32": (5.40, 0.11),
    "w4g64": (5.56, 0.14),
    "w4g128": (5.60, 0.14),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", often(LOSSES, ("bf16", "w8", "w4g128")))
def test_what_a_precision_costs(
    precision: str, exact: LogProbs, stories: list[list[int]], shared: Path, tmp_path: Path
) -> None:
    found = log_probs(engine_of(shared / "models/stories260K", tmp_path, "--precision", precision), stories)
    most_perplexity, most_divergence = LOSSES[precision]
    assert 4.94 < perplexity(found, stories) < most_perplexity
    divergence = (np.exp(exact) * (exact - found)).sum(axis=1).mean()  # KL(exact || found), in nats
    assert 0 < divergence < most_divergence


@pytest.mark.slow
def test_perplexity_of_a_trained_model(exact: LogProbs, stories: list[list[int]]) -> None:
    assert 4.94 < perplexity(exact, stories) < 4.953


@pytest.mark.slow
def test_perplexity_with_an_int8_cache(stories: list[list[int]], shared: Path, tmp_path: Path) -> None:
    options = ("--precision", "f32", "--kv_cache_dtype", "int8")
    found = log_probs(engine_of(shared / "models/stories260K", tmp_path, *options), stories)
    assert perplexity(found, stories) == pytest.approx(4.948, abs=0.02)


def log_probs(engine: Path, prompts: list[list[int]]) -> LogProbs:
    """Of every token of every prompt, one prompt after the other."""
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(prompts, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    rows = np.concatenate(out["context_logits"]).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def perplexity(found: LogProbs, prompts: list[list[int]]) -> float:
    """Of every token but the first of each prompt, each under the log-probabilities of the token before."""
    before = np.delete(np.arange(len(found)), np.cumsum([len(ids) for ids in prompts]) - 1)
    targets = np.concatenate([ids[1:] for ids in prompts])
    assert len(targets) == 25_367
    return float(np.exp(-found[before, targets].mean()))
