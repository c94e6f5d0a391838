"""`verify --against` on the emulated GPU: sound engines of many families pass, wrong kernels are named."""

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Bound
from ingot.step_io import Float32
from tests.handmade import write_model

# Of those that differ in norms, attention, rotation or activation; test_session.py runs those that cover all.
FAMILIES = [("llama", "bf16"), ("gemma3_text", "bf16"), ("gpt2", "bf16"), ("llama", "f32"), ("llama", "f16")]
MORE_FAMILIES = [
    *((name, "bf16") for name in ("gemma2", "gpt_neox", "glm4", "olmo2", "phi3", "stablelm", "starcoder2")),
    *(("gpt2", "f16"), ("gemma3_text", "f16"), ("qwen3_5_text", "bf16"), ("granitemoehybrid", "f16")),
    ("deepseek_v3", "bf16"),
    ("mixtral", "bf16"),
]
OPTIONS = CompareOptions(tokens=48)


def _built(
    folder: Path, family: str, precision: str, dtype: DType | None = None, kv: str = "auto"
) -> tuple[Path, Path]:
    """(engine, Checkpoint). Prompts run in two chunks, then a last token. dtype: of the Checkpoint; kv: cache type."""
    config = dict(find_family(family).tiny)
    if "head_dim" in config:
        config["head_dim"] = 16
    elif "num_attention_heads" in config:
        config["hidden_size"] = 16 * int(str(config["num_attention_heads"]))
    write_model(folder / "model", config)
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint", dtype=dtype))
    options = BuildConfig(target="cuda/sm90", precision=precision, tokens_per_block=16, max_num_tokens=24)
    options = dataclasses.replace(options, kv_cache_dtype=kv)
    build(options, folder / "checkpoint", folder / "engine")
    return folder / "engine", folder / "checkpoint"


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("family", "precision"), [*FAMILIES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_FAMILIES)]
)
def test_a_sound_engine(gpu: ctypes.CDLL, family: str, precision: str, tmp_path: Path) -> None:
    """Also where embedding and lm_head are one weight, and what products read is rounded where it is made."""
    engine, checkpoint = _built(tmp_path, family, precision)
    comparison = compare(engine, checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    assert comparison.layers == "compared"
    if precision != "f32":
        nearest = {step.name.split("/")[-1]: step.kernel_error or 0.0 for step in comparison.steps}
        assert 0.1 < nearest["attention"] < 0.8, "neither too narrow nor as wide as the sky"


@pytest.mark.daily(1)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", DType.BF16), ("f16", DType.F16)])
def test_weights_without_an_error_excuse_nothing(
    gpu: ctypes.CDLL, precision: str, dtype: DType, tmp_path: Path
) -> None:
    """Those of the Checkpoint, exactly: all that is off comes from what is rounded on the way."""
    engine, checkpoint = _built(tmp_path, "llama", precision, dtype)
    comparison = compare(engine, checkpoint, OPTIONS)
    assert {step.weight_error for step in comparison.steps} == {0.0}
    comparison.raise_if_wrong()


@pytest.mark.daily(2)
@pytest.mark.parametrize("step", ["layers.1/attention", "layers.0/gate_up", "final_norm"])
def test_a_wrong_kernel_is_named(gpu: ctypes.CDLL, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is rounded to bf16 as that of a sound one: each row is shifted by one column."""
    engine, checkpoint = _built(tmp_path, "llama", "bf16")
    real = CudaSession._outputs

    def exchanged(self: CudaSession, bound: Bound, counts: Counts) -> dict[str, Float32]:
        found = real(self, bound, counts)
        if bound.step.name == step:
            found = {name: np.roll(values, 1, axis=1) for name, values in found.items()}
        return found

    monkeypatch.setattr(CudaSession, "_outputs", exchanged)
    with pytest.raises(EngineError, match=rf"is {step}\n(.|\n)*output of kernel"):
        compare(engine, checkpoint, OPTIONS).raise_if_wrong()
