"""What nobody knows is refused by name, with ingot's way; what is known is never listed as unknown."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import ingot.configs.sampling
import ingot.llm
import ingot.runtime.llm_prompts
import ingot.runtime.model_runner
from ingot.configs.sampling import SamplingParams
from ingot.configs.unknown import parameters
from ingot.errors import IngotError, RequestError, UsageError
from ingot.llm import LLM
from ingot.runtime.llm import EngineLLM
from ingot.runtime.model_runner import ModelRunner


@pytest.mark.parametrize(
    ("call", "kind", "argument", "words"),
    [
        (SamplingParams, RequestError, "max_new_tokens", "say max_tokens"),
        (SamplingParams, RequestError, "include_stop_str_in_output", "say include_stop_str"),
        (SamplingParams, RequestError, "temprature", "did you mean 'temperature'"),
        (SamplingParams, RequestError, "zzz", "leave it out"),
        (LLM, UsageError, "max_seq_len", "say max_model_len"),
        (LLM, UsageError, "trust_remote_code", "no code of a checkpoint"),
        (LLM, UsageError, "quantization", "precision"),
        (LLM, UsageError, "kv_cache_memry", "did you mean 'kv_cache_memory'"),
        (ModelRunner.from_dir, UsageError, "gpu_memory_utilization", "kv_cache_memory"),
        (ModelRunner.from_dir, UsageError, "max_model_len", "say max_seq_len"),
        (ModelRunner.from_dir, UsageError, "max_batch_sise", "did you mean 'max_batch_size'"),
    ],
)
def test_what_is_unknown_names_the_way(
    call: Callable[..., Any], kind: type[IngotError], argument: str, words: str
) -> None:
    model = () if call is SamplingParams else ("nowhere",)
    with pytest.raises(kind, match=f"no argument '{argument}'") as refused:
        call(*model, **{argument: 3})
    assert words in str(refused.value)
    assert "others" not in (refused.value.expected or "")


def test_sampling_parameters_have_names() -> None:
    with pytest.raises(RequestError, match="named arguments only"):
        SamplingParams(64)  # type: ignore[call-arg]


def test_none_says_nothing_where_others_have_the_argument() -> None:
    assert SamplingParams(best_of=None) == SamplingParams()  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="no argument 'zzz'"):
        SamplingParams(zzz=None)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("functions", "ways"),
    [
        ((SamplingParams,), ingot.configs.sampling._WAYS),
        ((LLM,), ingot.llm._WAYS),
        ((ModelRunner.from_dir,), ingot.runtime.model_runner._OPENING_WAYS),
        ((ModelRunner.generate,), ingot.runtime.model_runner._WAYS),
        ((EngineLLM.generate, EngineLLM.generate_async, EngineLLM.chat), ingot.runtime.llm_prompts.WAYS),
    ],
)
def test_what_is_known_is_no_argument_of_others(
    functions: tuple[Callable[..., Any], ...], ways: Mapping[str, str]
) -> None:
    for function in functions:
        assert not set(parameters(function)) & set(ways)
