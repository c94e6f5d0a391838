"""Engines with drafts as users have them: the tokens, log probabilities and texts of engines without."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.configs.structured_outputs import StructuredOutputs
from ingot.convert.family import find_family
from ingot.engine import read_manifest, read_plan
from ingot.errors import UsageError
from ingot.llm import LLM
from ingot.manifest import DRAFT
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.registry import find_target
from ingot.quickstart import SHIPPED
from ingot.runtime.drafts.draft_model import DraftModel
from ingot.runtime.drafts.row_times import RowTimes
from ingot.runtime.model_runner import ModelRunner
from tests.e2e.command import ingot
from tests.e2e.same_bits import RUNNABLE, VOCAB, build_for_all, check_drafts, opened, random_checkpoint
from tests.handmade import TINY_LLAMA, write_model

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]

AVX2 = ("--target", "cpu/avx2", "--no_autotune")
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
PRECISIONS = ("f32", "bf16", "w8", "w4g32")
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def engines(shipped_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in w8, and in bf16 with itself as its draft model."""
    folder = tmp_path_factory.mktemp("speculation")
    for name, options in (("w8", ("--precision", "w8")), ("drafted", ("--draft_dir", shipped_checkpoint))):
        made = ("--checkpoint_dir", shipped_checkpoint, "--output_dir", folder / name, *AVX2, *options)
        ingot("build", *made).succeeds()
    return folder


@pytest.fixture(autouse=True)
def _all_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are as many as there can be, however fast the machine is."""
    monkeypatch.setattr(RowTimes, "predict", lambda self, rows: 1.0)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, requests, depth: 0.0)


def prompts() -> list[list[int]]:
    """Some of them repeat themselves."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(3, 2000, rng.integers(2, 30)).tolist() for _ in range(6)]
    return [[1, *part] for part in parts] + [[1, *part, *part[:3]] for part in parts[:3]]


@contextlib.contextmanager
def runner(engine: Path, speculation: object, **options: Any) -> Iterator[ModelRunner]:
    with ModelRunner.from_dir(engine, threads=2, speculative_config=speculation, **options) as opened:
        yield opened


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3, "random_seed": 3, "num_return_sequences": 2},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "presence_penalty": 0.4, "random_seed": 11},
    {"min_length": 60, "bad_words_list": [[[5, 6], [7]]] * 9, "stop_words_list": [[[300, 301], [40]]] * 9},
]


@pytest.mark.parametrize("asked", ASKED, ids=["greedy", "sampled", "penalised", "words"])
@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["ngram", "draft_model"])
def test_results_are_the_same_to_the_bit(engines: Path, speculation: dict[str, Any], asked: dict[str, Any]) -> None:
    """In steps of few and of many requests, some of them preempted."""
    wanted: dict[str, Any] = {"max_new_tokens": 150, "return_dict": True, "output_log_probs": True, **asked}
    with runner(engines / "drafted", None) as plain:
        expected = plain.generate(prompts(), output_generation_logits=True, **wanted)
    for options in ({"max_batch_size": 1}, {"max_batch_size": 4, "kv_cache_memory": "1MiB"}):
        with runner(engines / "drafted", speculation, **options) as opened:
            found = opened.generate(prompts(), output_generation_logits=True, **wanted)
            work = opened.executor.work()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same = np.array_equal(found[name], value, equal_nan=True) if isinstance(value, np.ndarray) else None
            assert same or found[name] == value, name
        if options["max_batch_size"] == 1 and not asked:
            assert work.right_drafts > 300
            assert work.drafted == work.right_drafts or speculation is NGRAM, "the model itself is never wrong"
        assert work.right_drafts > 0 or speculation is NGRAM


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in which some layers have windows, for every target that runs here, in several precisions."""
    folder = tmp_path_factory.mktemp("windowed")
    random_checkpoint(
        folder,
        {**find_family("gemma3_text").tiny, "sliding_window": 16, "vocab_size": VOCAB, "max_position_embeddings": 256},
    )
    for precision in PRECISIONS:
        build_for_all(folder / "c", folder / precision, precision, 112)
    return folder


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_drafts_change_no_bit_on_any_target(windowed: Path, precision: str, name: str) -> None:
    target = find_target(name)
    model = opened(windowed / precision, target)
    check_drafts(model, target, model.plan.in_each(60))


def test_streams_bring_the_same_tokens_in_fewer_parts(engines: Path) -> None:
    with runner(engines / "w8", None) as plain, runner(engines / "w8", NGRAM) as drafted:
        parts = [list(each.generate([prompts()[0]], max_new_tokens=200, streaming=True)) for each in (plain, drafted)]
        assert np.array_equal(parts[0][-1], parts[1][-1])
        assert drafted.executor.work().steps < plain.executor.work().steps
        lengths = [part.shape[-1] for part in parts[1]]
        assert lengths == sorted(set(lengths))


def test_texts_of_llm_and_of_the_command_are_the_same(engines: Path) -> None:
    said = []
    for speculation in (None, NGRAM):
        with contextlib.closing(LLM(engines / "w8", threads=2, speculative_config=speculation)) as llm:
            said.append([each.outputs[0].text for each in llm.generate(["Once upon a time", "The dog"])])
    command = ("run", "--engine_dir", engines / "w8", "--prompt", "Once", "--temperature", 0, "--max_output_len", 200)
    plain = ingot(*command).succeeds().out
    assert ingot(*command, "--speculative-config", json.dumps(NGRAM)).succeeds().out == plain


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "rank": {"enum": ["soldier", "general"]},
        "friends": {"type": "array", "items": {"enum": ["prince", "count"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "rank", "friends"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("speculation", [NGRAM, DRAFT_MODEL], ids=["ngram", "draft_model"])
def test_structured_outputs_are_the_same(engines: Path, speculation: dict[str, Any]) -> None:
    """What the grammar forces is drafted, too."""
    pytest.importorskip("llguidance")
    asked = [f"The prince {number} said: " for number in range(4)]
    said = []
    for drafts in (None, speculation):
        with contextlib.closing(LLM(engines / "drafted", threads=2, speculative_config=drafts)) as llm:
            for temperature in (0, 0.8):
                form = StructuredOutputs(json=SCHEMA)
                params = SamplingParams(max_tokens=150, temperature=temperature, seed=4, structured_outputs=form)
                said.append(
                    [(each.outputs[0].text, each.outputs[0].finish_reason) for each in llm.generate(asked, params)]
                )
            work = llm.runner.executor.work()
    assert said[:2] == said[2:]
    assert work.right_drafts > 20


def test_the_draft_model_is_a_whole_engine_inside(engines: Path) -> None:
    folder = engines / "drafted"
    names = [part.name for part in read_manifest(folder).parts]
    assert f"{DRAFT}/rank0.engine" in names
    assert f"{DRAFT}/config.json" in names
    assert read_plan(folder / DRAFT).limits == read_plan(folder).limits
    assert "all hashes match" in ingot("verify", folder).succeeds().out
    ingot("run", "--engine_dir", folder / DRAFT, "--prompt", "Once", "--max_output_len", 4).succeeds()


def test_a_damaged_draft_model_is_refused(engines: Path, tmp_path: Path) -> None:
    shutil.copytree(engines / "drafted", tmp_path / "e")
    path = tmp_path / "e" / DRAFT / "rank0.engine"
    data = bytearray(path.read_bytes())
    data[-9000] ^= 1
    path.write_bytes(data)
    ingot("verify", tmp_path / "e").fails("SHA-256 differs", f"{DRAFT}/rank0.engine")
    asked = ("run", "--engine_dir", tmp_path / "e", "--prompt", "x", "--speculative_config", json.dumps(DRAFT_MODEL))
    ingot(*asked).fails("damaged")
    path.write_bytes(data[:-1])
    ingot("run", "--engine_dir", tmp_path / "e", "--prompt", "x").fails("truncated")


def test_an_engine_without_a_draft_model_says_so(engines: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"there is no draft model(.|\n)*--draft_dir"),
        runner(engines / "w8", DRAFT_MODEL),
    ):
        pass
    named = {**DRAFT_MODEL, "model": str(engines / "drafted")}
    with runner(engines / "w8", named, max_batch_size=1) as opened, runner(engines / "w8", None) as plain:
        asked: dict[str, Any] = {"max_new_tokens": 60}
        assert np.array_equal(opened.generate(prompts(), **asked), plain.generate(prompts(), **asked))
        assert opened.executor.work().right_drafts > 0


def test_a_draft_model_with_another_vocabulary_is_refused(shipped_checkpoint: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "model", TINY_LLAMA)
    tokenizer = json.loads((SHIPPED / "tokenizer.json").read_text())
    first, second, *_ = tokenizer["model"]["vocab"]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    ingot("convert", "--model_dir", other, "--output_dir", tmp_path / "c").succeeds()
    made = ("--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", "--draft_dir", tmp_path / "c")
    ingot("build", *made, *AVX2).fails("another vocabulary", code=2)
    assert not (tmp_path / "e").exists()
    for wrong, words in (
        (("--refit",), "refit"),
        (("--max_draft_len", "0"), "max_draft_len"),
        (("--pp_size", "2"), "pipeline stages computes no drafts"),
        (("--target", "cuda/sm90"), "cuda/sm90 computes no drafts"),
    ):
        ok = ("--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", "--draft_dir", shipped_checkpoint)
        ingot("build", *ok, *AVX2, *wrong).fails(words, code=2)


def test_a_draft_model_that_cannot_be_built_is_refused_first(shipped_checkpoint: Path, tmp_path: Path) -> None:
    """Its weights are read as late as those of the large model."""
    shutil.copytree(shipped_checkpoint, tmp_path / "c")
    (tmp_path / "c" / "model.onnx").write_bytes(b"no graph")
    made = ("--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", "--draft_dir", tmp_path / "c")
    refused = ingot("build", *made, *AVX2)
    refused.fails("model.onnx")
    assert "building the draft model" not in refused.err
    assert not (tmp_path / "e").exists()


def test_models_with_states_have_no_drafts(shipped_checkpoint: Path, tmp_path: Path) -> None:
    states = random_checkpoint(tmp_path, {**find_family("lfm2").tiny, "vocab_size": VOCAB})
    for model, draft, words in (
        (states, shipped_checkpoint, "the model keeps states"),
        (shipped_checkpoint, states, "the draft model keeps states"),
    ):
        made = ("--checkpoint_dir", model, "--output_dir", tmp_path / "e", "--draft_dir", draft)
        ingot("build", *made, *AVX2).fails(words, code=2)
    ingot("build", "--checkpoint_dir", states, "--output_dir", tmp_path / "e", *AVX2).succeeds()
    with pytest.raises(UsageError, match="keeps states"), runner(tmp_path / "e", NGRAM):
        pass


def test_a_step_has_room_for_the_drafts_of_all(shipped_checkpoint: Path, tmp_path: Path) -> None:
    asked = ("--max_batch_size", 100, "--max_draft_len", 7, *AVX2)
    ingot("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", *asked).succeeds()
    assert read_plan(tmp_path / "e").limits.max_logit_rows == 800
