"""ModelRunner as the contract describes it, on the ref target with a tiny model."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import CapacityError, EngineError, RequestError, TargetError, UsageError
from ingot.runtime import ModelRunner
from ingot.step_io import StepBatch
from tests.runtime.fake_session import FakeSession, continued
from tests.runtime.tiny_engine import make_runner, ref_session, write_tiny
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return make_model()


@pytest.fixture(scope="module")
def runner(model: TinyModel) -> Iterator[ModelRunner]:
    with make_runner(model, ref_session(model, 200)) as runner:
        yield runner


@pytest.fixture(scope="module")
def directory(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("engines") / "tiny", model)


def fake_runner(blocks: int = 100, before: Callable[[StepBatch], None] | None = None) -> ModelRunner:
    """A runner whose tokens are a hash, for tests of the loop alone."""
    model = make_model()
    plan = dataclasses.replace(model.plan, vocab_size=97)
    session = FakeSession(blocks, plan.tokens_per_block, plan.limits)
    if before is not None:
        session.before_step = before
    return make_runner(dataclasses.replace(model, plan=plan), session)


def test_greedy_tokens_follow_the_model(runner: ModelRunner, model: TinyModel) -> None:
    ids = runner.generate(PROMPTS, max_new_tokens=12, end_id=-1, pad_id=7)
    assert ids.dtype == np.int32
    assert ids.shape == (3, 1, 9 + 12)
    for row, prompt in zip(ids[:, 0], PROMPTS, strict=True):
        assert row[: len(prompt) + 12].tolist() == model.greedy(prompt, 12)
        assert (row[len(prompt) + 12 :] == 7).all()
    assert runner.stats()["blocks_used"] == 0


@pytest.mark.parametrize("form", ["lists", "arrays", "matrix", "torch"])
def test_forms_of_prompts(runner: ModelRunner, form: str) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    given: Any = prompts
    if form == "arrays":
        given = [np.array(prompt, np.int64) for prompt in prompts]
    elif form == "matrix":
        given = np.array(prompts)
    elif form == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.tensor(prompt) for prompt in prompts]
    expected = runner.generate(prompts, max_new_tokens=3)
    np.testing.assert_array_equal(runner.generate(given, max_new_tokens=3), expected)


def test_dictionary(runner: ModelRunner, model: TinyModel) -> None:
    end = model.greedy(PROMPTS[1], 4)[-1]
    out = runner.generate(
        PROMPTS,
        max_new_tokens=6,
        end_id=[end],
        return_dict=True,
        output_log_probs=True,
        output_generation_logits=True,
        output_context_logits=True,
    )
    assert out["sequence_lengths"].dtype == np.int32
    assert out["log_probs"].shape == (3, 1, 6)
    assert out["generation_logits"].shape == (3, 1, 6, VOCAB)
    for i, prompt in enumerate(PROMPTS):
        tokens = model.greedy(prompt, 6)[len(prompt) :]
        stopped = end in tokens
        tokens = tokens[: tokens.index(end) + 1] if stopped else tokens
        assert out["finish_reasons"][i] == ["stop" if stopped else "length"]
        assert out["sequence_lengths"][i, 0] == len(prompt) + len(tokens)
        raw = model.logits(prompt + tokens)
        scale = np.ptp(raw)
        assert np.abs(out["context_logits"][i] - raw[: len(prompt)]).max() < 1e-4 * scale
        generation = raw[len(prompt) - 1 : -1]
        assert np.abs(out["generation_logits"][i, 0, : len(tokens)] - generation).max() < 1e-4 * scale
        log_probs = [row[t] - np.log(np.exp(row).sum()) for row, t in zip(generation, tokens, strict=True)]
        np.testing.assert_allclose(out["log_probs"][i, 0, : len(tokens)], log_probs, atol=1e-3)
        assert (out["log_probs"][i, 0, len(tokens) :] == 0).all()
        np.testing.assert_allclose(out["cum_log_probs"][i, 0], sum(log_probs), atol=1e-3)


def test_streaming_is_cumulative(runner: ModelRunner) -> None:
    whole = runner.generate(PROMPTS, max_new_tokens=5, return_dict=True, output_log_probs=True)
    steps = list(runner.generate(PROMPTS, max_new_tokens=5, return_dict=True, output_log_probs=True, streaming=True))
    assert len(steps) == 5
    for done, step in enumerate(steps, start=1):
        assert step["output_ids"].shape == (3, 1, 9 + done)
        assert step["sequence_lengths"][:, 0].tolist() == [len(prompt) + done for prompt in PROMPTS]
        assert (step["log_probs"][:, :, done:] == 0).all()
    assert steps[0]["finish_reasons"] == [[None]] * 3
    for key in ("output_ids", "sequence_lengths", "log_probs", "cum_log_probs"):
        np.testing.assert_array_equal(steps[-1][key], whole[key])
    assert steps[-1]["finish_reasons"] == whole["finish_reasons"] == [["length"]] * 3


def test_first_piece_comes_before_the_second_step_ends() -> None:
    begun: list[StepBatch] = []

    def slow(batch: StepBatch) -> None:
        time.sleep(0.1 * len(begun))
        begun.append(batch)

    runner = fake_runner(before=slow)
    stream = runner.generate([[1, 2]], max_new_tokens=3, streaming=True)
    next(stream)
    assert len(begun) == 1
    assert len(list(stream)) == 2


def test_more_prompts_than_the_batch() -> None:
    runner = fake_runner()
    prompts = [[n % 90, n % 7] for n in range(150)]
    ids = runner.generate(prompts, max_new_tokens=4)
    assert ids[:, 0, 2:].tolist() == [continued(prompt, 4) for prompt in prompts]


def test_seeds(runner: ModelRunner) -> None:
    def draw(**more: Any) -> list[list[list[int]]]:
        tokens: list[list[list[int]]] = runner.generate(
            [[1, 2], [1, 2]], max_new_tokens=12, temperature=3.0, **more
        ).tolist()
        return tokens

    assert draw(random_seed=5) == draw(random_seed=5)
    assert draw(random_seed=5)[0] == draw(random_seed=5)[1]
    assert draw(random_seed=[5, 6])[0] != draw(random_seed=[5, 6])[1]
    assert draw()[0] != draw()[1]
    several = draw(random_seed=5, num_return_sequences=3)
    assert np.array(several).shape == (2, 3, 14)
    assert several[0][0] == draw(random_seed=5)[0][0]
    assert several[0][1] == draw(random_seed=6)[0][0]


def test_numbers_and_lists_of_numpy(runner: ModelRunner) -> None:
    """Seeds and end tokens come out of arrays as they come out of lists."""

    def drawn(**given: Any) -> list[Any]:
        ids = runner.generate([[1, 2], [3, 4, 5]], max_new_tokens=8, temperature=1.0, **given)
        return cast(list[Any], ids.tolist())

    assert drawn(random_seed=np.int64(3)) == drawn(random_seed=3)
    arrays = {"random_seed": np.array([3, 4]), "end_id": np.array([5, 6])}
    assert drawn(**arrays) == drawn(**{name: array.tolist() for name, array in arrays.items()})


def test_greedy_unless_sampling_is_asked_for(runner: ModelRunner, model: TinyModel) -> None:
    greedy = model.greedy([1, 2], 12)
    assert runner.generate([[1, 2]], max_new_tokens=12)[0, 0].tolist() == greedy
    assert runner.generate([[1, 2]], max_new_tokens=12, top_k=1)[0, 0].tolist() == greedy
    assert runner.generate([[1, 2]], max_new_tokens=12, temperature=0)[0, 0].tolist() == greedy
    assert runner.generate([[1, 2]], max_new_tokens=12, top_p=0.999, random_seed=1)[0, 0].tolist() != greedy
    params = SamplingParams(max_tokens=12, temperature=0)
    assert runner.generate([[1, 2]], sampling_config=params)[0, 0].tolist() == greedy


def test_stop_words() -> None:
    runner = fake_runner()
    tokens = continued([5], 20)
    out = runner.generate([[5], [5]], max_new_tokens=20, stop_words_list=[[tokens[3:5]], None], return_dict=True)
    assert out["finish_reasons"] == [["stop"], ["length"]]
    assert out["output_ids"][0, 0, :6].tolist() == [5, *tokens[:5]]
    assert out["sequence_lengths"][0, 0] == 6


def test_end_ids_of_the_engine(model: TinyModel) -> None:
    end = model.greedy([1, 2], 3)[-1]
    with make_runner(model, ref_session(model, 40), eos_ids=(end, 50)) as runner:
        assert runner.generate([[1, 2]], max_new_tokens=9).shape[2] <= 5
        assert runner.generate([[1, 2]], max_new_tokens=9, end_id=-1).shape[2] == 11
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        assert runner.generate([[1, 2]], sampling_config=params).shape[2] == 11


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_input_ids": [1, 2]}, "flat list"),
        ({"batch_input_ids": "text"}, "list of prompts"),
        ({"batch_input_ids": [[]]}, "no tokens"),
        ({"batch_input_ids": [[1], [51]]}, "prompt 1"),
        ({"batch_input_ids": [[-1]]}, "0 to 50"),
        ({"batch_input_ids": [[1.5]]}, "whole numbers"),
        ({"batch_input_ids": [[[1], [1, 2]]]}, "prompt 0"),
        ({"batch_input_ids": [[1] * 49]}, "max_input_len"),
        ({"max_new_tokens": 65}, "max_seq_len"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"random_seed": -3}, "seed"),
        ({"random_seed": [1, 2]}, "one per prompt"),
        ({"end_id": 51}, "end_id"),
        ({"end_id": ""}, "end_id"),
        ({"batch_input_ids": np.array(3)}, "batch_input_ids"),
        ({"batch_input_ids": {}}, "list of prompts"),
        ({"num_return_sequences": 2**31}, "at most 65536"),
        ({"presence_penalty": ""}, "presence_penalty"),
        ({"frequency_penalty": []}, "frequency_penalty"),
        ({"streaming": "no"}, "streaming must be True or False"),
        ({"output_context_logits": np.array([1, 0])}, "output_context_logits must be"),
        ({"pad_id": "x"}, "pad_id"),
        ({"num_beams": 2}, "num_beams is not supported: ingot has no beam search"),
        ({"bad_words_list": [[1]]}, "bad_words_list"),
        ({"bad_words_list": []}, "bad_words_list must hold"),
        ({"bad_words_list": [[[51]]]}, "bad_words_list: 0 of prompt 0"),
        ({"min_length": -1}, "min_length"),
        ({"min_length": 21}, "asked for at least"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "1"}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"length_penalty": 1.0}, "no argument 'length_penalty'"),
        ({"temprature": 0.5}, "did you mean 'temperature'"),
        ({"stop_words_list": [[1]]}, "stop_words_list"),
        ({"stop_words_list": np.zeros((1, 2, 3))}, "stop_words_list"),
        ({"output_log_probs": True}, "return_dict=True"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 1001}, "priority"),
        ({"cache_salt": b"x"}, "cache_salt must be text"),
        ({"sampling_config": {"temperature": 1}}, "SamplingParams"),
        ({"sampling_config": SamplingParams(), "top_k": 3}, "exclude each other"),
    ],
)
def test_wrong_calls_are_refused_before_anything_runs(
    runner: ModelRunner, arguments: dict[str, Any], words: str
) -> None:
    steps = len(runner.step_log())
    with pytest.raises(RequestError, match=words):
        runner.generate(**{"batch_input_ids": [[1, 2]], **arguments})
    assert len(runner.step_log()) == steps
    assert runner.stats()["requests_waiting"] == 0


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"stop": ["x"]}, "stop_words_list"),
        ({"bad_words": ["x"]}, "bad_words_list"),
        ({"include_stop_str": True}, "token ids"),
        ({"skip_special_tokens": False}, "token ids"),
        ({"logit_bias": {51: 1.0}}, "logit_bias"),
        ({"logprobs": 52}, "at most 51"),
        ({"logprobs": 1}, "return_dict"),
        ({"logits_processors": [lambda a, b, c, d: d]}, "wrong number"),
    ],
)
def test_sampling_params_that_token_ids_cannot_follow(runner: ModelRunner, field: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        runner.generate([[1, 2]], sampling_config=SamplingParams(**field), return_dict=words != "return_dict")


def test_lengths_are_lowered_only_by_default(runner: ModelRunner) -> None:
    assert runner.generate([[1] * 3]).shape[2] == 23
    assert runner.generate([[1] * 48]).shape[2] == 65
    assert runner.generate([[1] * 48], max_new_tokens=17).shape[2] == 65  # the last token needs no position
    with pytest.raises(RequestError, match="17 new ones"):
        runner.generate([[1] * 48], max_new_tokens=18)


def test_nothing_to_do(runner: ModelRunner) -> None:
    assert runner.generate([]).shape == (0, 1, 0)
    assert runner.generate([], num_return_sequences=3).shape == (0, 3, 0)
    assert list(runner.generate([], streaming=True)) == []
    empty = runner.generate([], return_dict=True, output_log_probs=True, output_generation_logits=True)
    assert [empty[name].shape[:2] for name in ("log_probs", "generation_logits")] == [(0, 1), (0, 1)]


def test_from_dir(directory: Path, model: TinyModel) -> None:
    with ModelRunner.from_dir(directory, max_num_tokens=7, max_batch_size=2, kv_cache_memory="1MiB") as runner:
        assert runner.generate(PROMPTS, max_new_tokens=3)[0, 0, :8].tolist() == model.greedy(PROMPTS[0], 3)
        assert max(prefill + decode for prefill, decode in runner.step_log()) <= 7
        assert runner.stats()["blocks_total"] == (1 << 20) // model.plan.block_bytes
        assert runner.stats()["prefix_hit_tokens"] == 0
    with pytest.raises(RequestError, match="closed"):
        runner.generate([[1]])
    with ModelRunner.from_dir(str(directory)) as runner:
        assert runner.stats()["blocks_total"] == 64 * 4  # 64 sequences of 64 cached tokens


def test_from_dir_turns_the_prefix_cache_on_and_off(directory: Path) -> None:
    prompt = list(range(40))
    for enabled, salt, hits in ((True, None, 32), (True, "mine", 0), (False, None, 0)):
        with ModelRunner.from_dir(directory, enable_prefix_cache=enabled) as runner:
            first = runner.generate([prompt], max_new_tokens=4)
            again = runner.generate([prompt], max_new_tokens=4, cache_salt=salt)
            np.testing.assert_array_equal(first, again)
            assert runner.stats()["prefix_hit_tokens"] == hits
            assert (runner.stats()["blocks_cached"] > 0) == enabled


def test_from_dir_with_a_tpot_target(directory: Path, model: TinyModel) -> None:
    with ModelRunner.from_dir(directory, tpot_target=10_000, enable_chunked_prefill=True) as runner:
        assert runner.step_log() == []
        assert runner.stats()["blocks_used"] == runner.stats()["blocks_cached"] == 0
        assert runner.generate([[1, 2]], max_new_tokens=3)[0, 0].tolist() == model.greedy([1, 2], 3)


def test_return_sequences_share_their_prompt(model: TinyModel) -> None:
    with make_runner(model, ref_session(model, 200)) as runner:
        out = runner.generate(
            [list(range(40))], max_new_tokens=5, num_return_sequences=4, return_dict=True, output_context_logits=True
        )
        assert len(np.unique(out["output_ids"][0], axis=0)) == 1
        assert out["context_logits"][0].shape == (40, VOCAB)
        assert runner.stats()["prefix_hit_tokens"] == 3 * 32
        assert sum(prefill for prefill, _ in runner.step_log()) == 40 + 3 * 8


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_batch_size": 65}, UsageError, "at most 64"),
        ({"max_num_tokens": 1000}, UsageError, "--max_num_tokens 1000"),
        ({"max_batch_size": 0}, UsageError, "at least 1"),
        ({"kv_cache_memory": "1KiB"}, CapacityError, "too small for one sequence"),
        ({"kv_cache_memory": "900TiB"}, CapacityError, "more than this machine"),
        ({"kv_cache_memory": "lots"}, UsageError, "amount of memory"),
        ({"policy": "eager"}, UsageError, "max_utilization, guaranteed_no_evict"),
        ({"tpot_target": -5}, UsageError, "more than 0"),
        ({"tpot_target": 1e-6}, UsageError, "single token"),
        ({"enable_prefix_cache": 1}, UsageError, "True or False"),
        ({"enable_chunked_prefill": "yes"}, UsageError, "True or False"),
        ({"isa": "mmx"}, UsageError, "avx2, avxvnni, avx512, avx512bf16, amx"),
        ({"rank": 3}, EngineError, "rank"),
    ],
)
def test_from_dir_refuses(directory: Path, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ModelRunner.from_dir(directory, **arguments)


def test_foreign_target_is_refused(model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="abacus/1"):
        ModelRunner.from_dir(write_tiny(tmp_path / "foreign", model, target="abacus/1"))


def test_a_flipped_byte_is_found(model: TinyModel, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "flipped", model)
    part = directory / "rank0.engine"
    data = bytearray(part.read_bytes())
    data[-9] ^= 1
    part.write_bytes(data)
    with pytest.raises(EngineError, match="checksum"):
        ModelRunner.from_dir(directory)


@pytest.mark.slow
def test_needs_only_numpy(directory: Path) -> None:
    code = (
        "import sys; from ingot.runtime import ModelRunner\n"
        f"runner = ModelRunner.from_dir({str(directory)!r}); runner.generate([[1, 2]], max_new_tokens=2)\n"
        "foreign = {'torch', 'transformers', 'onnx', 'tokenizers', 'click', 'rich', 'safetensors'} & set(sys.modules)\n"
        "assert not foreign, foreign"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
