"""Engines with a screened lm_head as users have them: the tokens of engines without one, however they are asked."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.compare.compare import CompareOptions, compare
from ingot.configs.runtime import runtime_config
from ingot.configs.sampling import SamplingParams
from ingot.engine import open_engine, read_plan
from ingot.errors import RequestError
from ingot.inspect import inspect
from ingot.llm import LLM
from ingot.plan import Plan
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cpu.session import CpuSession
from ingot.plugins.layouts import unpack_quantised, unpack_table
from ingot.plugins.ops.screened_matmul import half_codes
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import Request
from ingot.runtime.session import load_engine
from ingot.runtime.validation import make_requests
from tests.e2e.command import ingot
from tests.hall.planted import Bytes, floats, replant
from tests.handmade import TINY_LLAMA, write_model

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]

VOCAB, HIDDEN = 3000, 96
MODEL = {
    **TINY_LLAMA,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
QUANTISED = ("--precision", "w4g32", "--activations", "int8", "--target", "cpu/avx2", "--no_autotune")
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, 5 + n).tolist() for n in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c: a Checkpoint whose lm_head is the token table; plain and screened: engines."""
    folder = tmp_path_factory.mktemp("screen")
    ingot("convert", "--model_dir", write_model(folder / "m", MODEL), "--output_dir", folder / "c").succeeds()
    for name, options in (("plain", ()), ("screened", ("--screen_lm_head",))):
        ingot("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / name, *QUANTISED, *options).succeeds()
    return folder


@contextlib.contextmanager
def runner(engine: Path, threads: int = 2) -> Iterator[tuple[ModelRunner, CpuSession]]:
    loaded = load_engine(engine, runtime_config(threads=threads))
    assert isinstance(loaded.session, CpuSession)
    with ModelRunner(loaded) as opened:
        yield opened, loaded.session


def tokens(opened: ModelRunner, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    found: list[list[int]] = opened.generate(prompts, end_id=-1, **options).tolist()
    return found


def logits_left(engine: Path, session: CpuSession, rows: int) -> list[int]:
    """How many logits the last step left of each row."""
    kept: list[int] = np.isfinite(session.native.read_buffer(read_plan(engine).logits, rows)).sum(axis=1).tolist()
    return kept


def finish(opened: ModelRunner, requests: list[Request]) -> None:
    opened.executor.complete(requests)


@pytest.mark.daily(1)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_hundreds_of_tokens_are_the_same(folder: Path, threads: int) -> None:
    with runner(folder / "plain") as (plain, _), runner(folder / "screened", threads) as (screened, session):
        for count in (1, 2, 3, 4):
            expected = tokens(plain, PROMPTS[:count], max_new_tokens=60)
            assert tokens(screened, PROMPTS[:count], max_new_tokens=60) == expected
            assert all(1 <= kept <= VOCAB / 8 for kept in logits_left(folder / "screened", session, count))


def test_in_company_of_others(folder: Path) -> None:
    """Of more sequences, of sampled ones, of streams, and with penalties: the same tokens, screened or not."""
    cases: list[tuple[int, dict[str, Any]]] = [
        (6, {}),
        (2, {"temperature": 0.8, "random_seed": 3}),
        (2, {"repetition_penalty": 1.3}),
        (1, {"min_length": 5}),
        (2, {"stop_words_list": [[[7, 8]], []]}),
        (1, {"num_return_sequences": 3}),
    ]
    with runner(folder / "plain") as (plain, _), runner(folder / "screened") as (screened, session):
        for count, options in cases:
            expected = tokens(plain, PROMPTS[:count], max_new_tokens=24, **options)
            assert tokens(screened, PROMPTS[:count], max_new_tokens=24, **options) == expected, options
        *_, last = screened.generate(PROMPTS[:2], max_new_tokens=24, end_id=-1, streaming=True)
        assert last.tolist() == tokens(plain, PROMPTS[:2], max_new_tokens=24)
        assert max(logits_left(folder / "screened", session, 2)) < VOCAB


def test_sampled_and_greedy_requests_in_one_batch(folder: Path) -> None:
    """Screened as soon as the sampled ones have ended."""
    params = [
        SamplingParams(max_tokens=40 - 20 * (n % 2), temperature=0.9 * (n % 2), seed=n, ignore_eos=True)
        for n in range(4)
    ]
    found, kept = [], []
    for engine in ("plain", "screened"):
        with runner(folder / engine) as (opened, session):
            requests = [
                make_requests(np.array(prompt, np.int32), one, opened.model_info, where="")[0]
                for prompt, one in zip(PROMPTS[:4], params, strict=True)
            ]
            finish(opened, requests)
            found.append([request.generated().tolist() for request in requests])
            kept.append(logits_left(folder / engine, session, 2))
    assert found[0] == found[1]
    assert kept[0] == [VOCAB, VOCAB]
    assert max(kept[1]) < VOCAB


@pytest.mark.slow
def test_sums_of_log_probabilities_are_left_out_unless_asked_for(shipped_checkpoint: Path, tmp_path: Path) -> None:
    build = ("build", "--checkpoint_dir", shipped_checkpoint, *QUANTISED)
    ingot(*build, "--output_dir", tmp_path / "e", "--screen_lm_head").succeeds()
    ingot(*build, "--output_dir", tmp_path / "p").succeeds()
    wanted = [SamplingParams(max_tokens=9, temperature=0, logprobs=logprobs) for logprobs in (None, 0)]
    with LLM(tmp_path / "e", threads=2) as screened, LLM(tmp_path / "p", threads=2) as plain:
        own = SamplingParams(max_tokens=9, temperature=0, logits_processors=[lambda logits: logits])
        processed = screened.generate(["Once upon a time"], own)[0].outputs[0]
        (left_out, there), (first, second) = (
            [llm.generate(["Once upon a time"], one)[0].outputs[0] for one in wanted] for llm in (screened, plain)
        )
    assert left_out.cumulative_logprob is None
    assert processed.cumulative_logprob is None
    assert there.cumulative_logprob == first.cumulative_logprob == second.cumulative_logprob
    assert left_out.text == there.text == first.text == processed.text


def test_log_probabilities_are_there_where_asked_for(folder: Path) -> None:
    wanted: dict[str, Any] = {"max_new_tokens": 12, "return_dict": True, "output_log_probs": True, "end_id": -1}
    with runner(folder / "plain") as (plain, _), runner(folder / "screened") as (screened, _):
        first, second = (each.generate(PROMPTS[:2], **wanted) for each in (plain, screened))
        assert first["log_probs"].tobytes() == second["log_probs"].tobytes()
        assert (first["log_probs"] < 0).all()
        logits: dict[str, Any] = {
            "output_generation_logits": True,
            "max_new_tokens": 4,
            "return_dict": True,
            "end_id": -1,
        }
        first, second = (each.generate(PROMPTS[:2], **logits) for each in (plain, screened))
        assert first["generation_logits"].tobytes() == second["generation_logits"].tobytes()


def test_a_prompt_whose_logits_are_no_numbers_fails_as_ever(folder: Path, tmp_path: Path) -> None:
    def poison(plan: Plan, section: Bytes) -> None:
        norm = [step for step in plan.steps if step.op == "rms_norm"][-1]
        floats(plan, section, norm.inputs[1])[3] = np.nan

    engine = replant(folder / "screened", tmp_path / "engine", poison)
    with runner(engine) as (opened, _), pytest.raises(RequestError, match="not finite numbers"):
        tokens(opened, PROMPTS[:1], max_new_tokens=4)


def test_weights_of_the_step(folder: Path) -> None:
    """The codes are made of lm_head's, the exact rows are those of the token table."""
    with open_engine(folder / "screened") as engine:
        plan, weights = engine.plan, {weight.name: weight for weight in engine.plan.weights}
        section = {
            name: np.concatenate([engine.weights[p.offset :] for p in each.pieces])[: each.nbytes]
            for name, each in weights.items()
        }
        head = plan.steps[-1]
        assert head.inputs[4] == next(step for step in plan.steps if step.op == "embedding").inputs[0]
        full = unpack_quantised(section[head.inputs[1]], VOCAB, HIDDEN)
        codes = unpack_quantised(section[head.inputs[2]], VOCAB, HIDDEN, 128)
        table = unpack_table(section[head.inputs[4]], HIDDEN)
        assert (codes.codes == half_codes(full).codes).all()
        assert (codes.scale == full.scale).all()
        assert (table.codes == full.codes).all()
        assert (table.scale == full.scale).all()
    assert "screened_matmul" in inspect(folder / "screened").text


@pytest.mark.slow
def test_verify_knows_the_weights(folder: Path, tmp_path: Path) -> None:
    assert compare(folder / "screened", folder / "c", CompareOptions(tokens=16)).findings == ()

    def wrong_code(plan: Plan, section: Bytes) -> None:
        weight = next(each for each in plan.weights if each.name == plan.steps[-1].inputs[2])
        section[weight.pieces[0].offset + 300] ^= 1

    def wrong_dither(plan: Plan, section: Bytes) -> None:
        floats(plan, section, plan.steps[-1].inputs[3])[5] += 1

    wrong = {"weight lm_head.codes, row": wrong_code, "weight lm_head.dither, row 5": wrong_dither}
    for name, edit in wrong.items():
        engine = replant(folder / "screened", tmp_path / edit.__name__, edit)
        (finding,) = compare(engine, folder / "c", CompareOptions(tokens=16)).findings
        assert name in finding.what


def test_refused_in_words(folder: Path, tmp_path: Path) -> None:
    build = ("build", "--checkpoint_dir", folder / "c", "--output_dir", tmp_path / "e", "--screen_lm_head", "--dry_run")
    refused = ingot(*build, "--target", "cpu/avx2", *QUANTISED[:4], "--lm_head_precision", "w4g128")
    assert refused.code == 1
    assert "lm_head is w4g128" in refused.err


def test_ref_interprets_the_plan(folder: Path, tmp_path: Path) -> None:
    build = ("build", "--checkpoint_dir", folder / "c", "--output_dir", tmp_path / "e", *QUANTISED, "--screen_lm_head")
    ingot(*build, "--target", "cpu/avx2,ref").succeeds()
    found = []
    for target in ("cpu/avx2", "ref"):
        with ModelRunner.from_dir(tmp_path / "e", target=target) as opened:
            found.append(tokens(opened, PROMPTS[:2], max_new_tokens=3))
    assert found[0] == found[1]
