"""ingot.LLM: engines and Hugging Face directories; what it applies, and what it refuses with the way to go."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import LLM, SamplingParams
from ingot.configs.build import BuildConfig
from ingot.dtypes import DType
from ingot.engine_cache import cache_key, default_cache
from ingot.errors import IngotError, MissingMethodError, RequestError, UsageError
from ingot.llm import _METHODS
from ingot.quickstart import SHIPPED
from tests.convert.gguf.test_blocks import write_llama
from tests.convert.gguf.test_tokenizer import settings_of, trained

pytestmark = pytest.mark.native
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def engine(cache: Path) -> Path:
    """Built by LLM itself, with a small limit."""
    LLM(SHIPPED, cache_dir=cache, max_model_len=64, max_num_seqs=8).close()
    (engine,) = (cache / "ingot" / "engines").iterdir()
    return engine


@pytest.mark.slow
def test_a_model_directory_is_built_once(engine: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = engine.stat().st_mtime_ns
    with LLM(model=str(SHIPPED), cache_dir=cache, max_model_len=64, max_num_seqs=8) as llm:
        (whole,) = llm.generate("The prince", GREEDY)
    assert "using the engine in" in capfd.readouterr().err
    assert engine.stat().st_mtime_ns == before
    with LLM(engine) as llm:
        (same,) = llm.generate(["The prince"], GREEDY)
        assert same.outputs[0].text == whole.outputs[0].text
        assert len(same.outputs[0].token_ids) == 12
        assert llm.runner.model_info.limits.max_seq_len == 64


@pytest.mark.slow
def test_the_build_can_be_told_its_types(cache: Path) -> None:
    with LLM(
        SHIPPED, cache_dir=cache, max_model_len=40, precision="w8", activations="bf16", kv_cache_dtype="int8"
    ) as llm:
        plan = llm.runner.engine.plan
        assert plan.caches[0].dtype is DType.I8
        assert {step.attrs["activations"] for step in plan.steps if "activations" in step.attrs} <= {"f32", "bf16"}
        assert DType.W8 in {weight.dtype for weight in plan.weights}
        assert llm.generate("The prince", GREEDY)[0].outputs[0].text
    with pytest.raises(UsageError, match=r"unknown kv_cache_dtype(.|\n)*fp8"):
        LLM(SHIPPED, cache_dir=cache, kv_cache_dtype="int4")


@pytest.mark.slow
def test_a_damaged_cache_is_built_again(engine: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (engine / "rank0.engine").open("r+b") as file:
        file.truncate(5000)
    LLM(SHIPPED, cache_dir=cache, max_model_len=64, max_num_seqs=8).close()
    assert "building an engine" in capfd.readouterr().err
    LLM(engine).close()


def test_logprobs_and_stop_texts_through_the_door(engine: Path) -> None:
    with LLM(engine) as llm:
        (free,) = llm.generate("The prince", GREEDY)
        text = free.outputs[0].text
        stop = text[5:9]
        params = SamplingParams(max_tokens=12, temperature=0, stop=stop, logprobs=1, prompt_logprobs=1)
        (result,) = llm.generate("The prince", params)
    assert result.outputs[0].text == text[: text.index(stop)]
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    logprobs = result.outputs[0].logprobs
    assert logprobs is not None
    decoded = [table[token].decoded for table, token in zip(logprobs, result.outputs[0].token_ids, strict=True)]
    assert "".join(str(piece) for piece in decoded).startswith(result.outputs[0].text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tensor_parallel_size": 2}, "ingot build --tp_size"),
        ({"gpu_memory_utilization": 0.9}, "kv_cache_memory"),
        ({"max_model_len": 65}, "--max_seq_len 65"),
        ({"max_model_len": 1}, "max_model_len must be a whole number, at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number, at least 1"),
        ({"kv_cache_memory": 0.5}, "at least 1 byte"),
        ({"max_num_seqs": 9}, "--max_batch_size 9"),
        ({"precision": "f32"}, "no effect on an Engine"),
        ({"kv_cache_dtype": "int8"}, "no effect on an Engine"),
        ({"activations": "int8"}, "no effect on an Engine"),
    ],
)
def test_what_does_not_fit_names_the_way(engine: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        LLM(engine, **arguments)


def test_the_formats_of_answers_can_be_named(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"reasoning_parser(.|\n)*think(.|\n)*got: thoughts"):
        LLM(engine, reasoning_parser="thoughts")
    pytest.importorskip("llguidance", reason="needs llguidance")
    template = tmp_path / "short.jinja"
    template.write_text("{{ tools[0].function.name }}{{ messages[0].content }}")
    closed = {"type": "object", "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": closed}}]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(max_tokens=48, temperature=0)
    with LLM(engine, tool_parser="glm47") as llm:
        (answer,) = llm.chat(messages, params, chat_template=str(template), **asked)
        (call,) = answer.outputs[0].tool_calls
        assert (call.name, call.arguments, llm.get_tokenizer().formats.names) == ("f", "{}", ("glm47", None))
    with LLM(engine) as llm, pytest.raises(RequestError, match="tool_parser=NAME"):
        llm.chat(messages, params, chat_template=str(template), **asked)


@pytest.mark.parametrize("value", [np.array(["avx2", "cpu"]), np.array([]), ["cpu"], b"cpu"], ids=repr)
@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("isa", "avx2, avxvnni, avx512, avx512bf16, amx"),
        ("target", "cpu/avx2"),
        ("policy", "max_utilization, guaranteed_no_evict"),
        ("precision", "auto, f32, bf16"),
        ("activations", "auto, bf16, f32, int8"),
        ("kv_cache_dtype", "auto, bf16"),
    ],
)
def test_names_are_text(argument: str, expected: str, value: Any, engine: Path, tmp_path: Path) -> None:
    """Whatever else is given is refused before it is compared with one, and before anything is built."""
    for model, cache_dir in ((engine, None), (SHIPPED, tmp_path)):
        with pytest.raises(UsageError, match=rf"{argument}(.|\n)*expected: .*{expected}(.|\n)*got: ") as caught:
            LLM(model, cache_dir=cache_dir, **{argument: value})
        assert repr(value) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_methods_of_other_libraries_are_refused_by_name(engine: Path) -> None:
    with LLM(engine) as llm:
        with pytest.raises(MissingMethodError, match=r"LLM has no method 'embed'(.|\n)*not supported in this version"):
            getattr(llm, "embed")  # noqa: B009
        assert not hasattr(llm, "beam_search")
        with pytest.raises(AttributeError, match="has no attribute 'generrate'"):
            getattr(llm, "generrate")  # noqa: B009


def test_no_method_that_exists_is_refused() -> None:
    assert [name for name in _METHODS if name in dir(LLM)] == []


def test_limits_of_an_engine_can_be_lowered(engine: Path) -> None:
    with LLM(engine, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16) as llm:
        limits = llm.runner.model_info.limits
        assert (limits.max_seq_len, limits.max_batch_size, limits.max_num_tokens) == (32, 2, 16)
        assert limits.max_input_len <= 32
        (result,) = llm.generate("Once", SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(result.prompt_token_ids) + len(result.outputs[0].token_ids) == 32


def test_neither_engine_nor_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither an Engine nor"):
        LLM(tmp_path)


def test_the_key_follows_source_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    shutil.copytree(SHIPPED, model)
    key = cache_key(model, BuildConfig())
    assert cache_key(SHIPPED, BuildConfig()) == key or (SHIPPED / "model.safetensors").stat().st_size > 1 << 20
    assert cache_key(model, BuildConfig(max_seq_len=64)) != key
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert cache_key(model, BuildConfig()) != key
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache"


def test_a_gguf_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is built as a directory is; what else lies beside it makes no other engine, a tokenizer.json might."""
    tokenizer = trained(None)
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write_llama(tmp_path, 8, vocab=tokenizer.get_vocab_size(), tokenizer=settings_of(tokenizer, "gpt-2"))
    with LLM(file, cache_dir=cache) as llm:
        (first,) = llm.generate("Once upon", GREEDY)
    assert first.prompt_token_ids == tokenizer.encode("Once upon").ids
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    capfd.readouterr()
    with LLM(str(file), cache_dir=cache) as llm:
        (again,) = llm.generate("Once upon", GREEDY)
    assert "using the engine in" in capfd.readouterr().err
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    key = cache_key(file, BuildConfig())
    (tmp_path / "tokenizer.json").write_text("{}")
    assert cache_key(file, BuildConfig()) != key
    with pytest.raises(IngotError, match="no such GGUF file"):
        LLM(tmp_path / "modell.gguf", cache_dir=cache)


@pytest.mark.slow
def test_names_are_loaded_when_asked_for() -> None:
    program = (
        "import sys, ingot\nfrom ingot.runtime import ModelRunner\n"
        "assert not {'tokenizers', 'onnx', 'click', 'ingot.llm'} & set(sys.modules), sys.modules\n"
        "from ingot import LLM, SamplingParams\nassert LLM and SamplingParams().temperature == 1.0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not hasattr(ingot, "LLMs")


def test_a_cache_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IngotError, match=r"cannot be read or written(.|\n)*cache_dir"):
        LLM(SHIPPED, cache_dir=tmp_path / "file")
