"""New weights in an engine: the bytes of a new build, refusals, and an old engine that stays whole."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_graphsurgeon.logger import G_LOGGER

from ingot.builder.build import build
from ingot.builder.calibrated.quantize import quantize
from ingot.builder.refit import refit
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import QuantizeOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import read_manifest
from ingot.engine_writer import store_verification
from ingot.errors import BuildError, EngineError, UsageError
from tests.builder.calibrated.test_quantize import TEXT, write_tokenizer
from tests.handmade import TINY_GPT2, TINY_LLAMA, write_model

TIED: dict[str, object] = {**TINY_LLAMA, "tie_word_embeddings": True, "attention_bias": True}
MIXTRAL: dict[str, object] = {
    **TINY_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
REF: dict[str, Any] = {"target": "ref", "activations": "f32", "autotune": False, "refit": True}


def checkpoint_of(folder: Path, config: dict[str, object] = TINY_LLAMA, seed: int = 0, **options: Any) -> Path:
    """Weights follow from the seed; eos is another token too."""
    model = write_model(folder / "m", {**config, "eos_token_id": 2 + seed})
    write_tokenizer(model)
    if seed:
        (model / "model.safetensors").write_bytes(_other_weights(model / "model.safetensors"))
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c", **options))
    return folder / "c"


def _other_weights(path: Path) -> bytes:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    values = np.frombuffer(raw[start:], np.uint8).copy()
    values[::4] ^= 1  # lowest bits of float32 and bf16
    return raw[:start] + values.tobytes()


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (TINY_LLAMA, {}),
        (TIED, {"precision": "w8"}),
        (TINY_LLAMA, {"precision": "w4g32", "lm_head_precision": "w4g32"}),
        (TINY_GPT2, {"precision": "bf16"}),
        (MIXTRAL, {"precision": "w4g32"}),
        (TINY_LLAMA, {"precision": "w8", "target": "cpu/avx2,ref", "activations": "int8"}),
    ],
)
def test_a_refit_has_the_bytes_of_a_build(tmp_path: Path, config: dict[str, object], options: dict[str, Any]) -> None:
    old, new = (checkpoint_of(tmp_path / str(seed), config, seed) for seed in (0, 1))
    given = BuildConfig(**{**REF, **options})
    build(given, old, tmp_path / "e")
    build(given, new, tmp_path / "fresh")
    before, wanted = files(tmp_path / "e"), files(tmp_path / "fresh")
    assert before["rank0.engine"] != wanted["rank0.engine"]
    report = refit(tmp_path / "e", new, tmp_path / "e2")
    assert files(tmp_path / "e2") == wanted
    assert files(tmp_path / "e") == before
    assert report.nbytes > 0
    refit(tmp_path / "e", new)  # in place, and once more
    refit(tmp_path / "e", old)
    assert files(tmp_path / "e") == before


@pytest.mark.slow
def test_quantised_weights_are_refitted(tmp_path: Path) -> None:
    config = {**TINY_LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    for seed in (0, 1):
        checkpoint = checkpoint_of(tmp_path / str(seed), config, seed)
        options = QuantizeOptions(output_dir=tmp_path / f"q{seed}", precision="w4g32", codes="symmetric")
        quantize(options, checkpoint, TEXT)
        build(BuildConfig(**REF), tmp_path / f"q{seed}", tmp_path / f"e{seed}")
    refit(tmp_path / "e0", tmp_path / "q1")
    assert files(tmp_path / "e0") == files(tmp_path / "e1")


def test_a_verification_does_not_outlive_its_weights(tmp_path: Path) -> None:
    old, new = (checkpoint_of(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    build(BuildConfig(**REF), old, tmp_path / "e")
    store_verification(tmp_path / "e", "ref", {"kl": 0.0})
    refit(tmp_path / "e", new)
    assert read_manifest(tmp_path / "e").verification == {}


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({**TINY_LLAMA, "intermediate_size": 48}, {}, "down/weight is another"),
        ({**TINY_LLAMA, "num_hidden_layers": 1}, {}, "no such weight"),
        (TINY_LLAMA, {"dtype": DType.F16}, r"expected: f32(.|\n)*got: f16"),
        ({**TINY_LLAMA, "rope_theta": 500.0}, {}, "constant rope/inv_freq is another"),
        (TINY_GPT2, {}, "is another"),
        ({**TINY_LLAMA, "hidden_act": "gelu"}, {}, "constant|another way"),
    ],
)
def test_other_models_are_refused(
    tmp_path: Path, config: dict[str, object], options: dict[str, Any], words: str
) -> None:
    build(BuildConfig(**REF), checkpoint_of(tmp_path / "0"), tmp_path / "e")
    before = files(tmp_path / "e")
    other = checkpoint_of(tmp_path / "1", config, **options)
    with pytest.raises(BuildError) as refused:
        refit(tmp_path / "e", other)
    assert re.search(words, str(refused.value)), str(refused.value)
    assert files(tmp_path / "e") == before


def test_what_cannot_be_refitted_is_said(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    build(BuildConfig(**{**REF, "refit": False}), checkpoint, tmp_path / "e")
    with pytest.raises(EngineError, match="without --refit"):
        refit(tmp_path / "e", checkpoint)
    with pytest.raises(UsageError, match="cannot be combined with --activations auto"):
        build(BuildConfig(**{**REF, "activations": "auto", "precision": "w8"}), checkpoint, tmp_path / "x")
    with pytest.raises(UsageError, match="cannot be combined with --tp_size"):
        build(BuildConfig(**{**REF, "tp_size": 2}), checkpoint, tmp_path / "x")
    with pytest.raises(BuildError, match="--screen_lm_head"):
        build(BuildConfig(**{**REF, "precision": "w8", "screen_lm_head": True}), checkpoint, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_interruption_or_damage_leaves_the_old_engine_whole(tmp_path: Path) -> None:
    old, new = (checkpoint_of(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    build(BuildConfig(**REF), old, tmp_path / "e")
    before = files(tmp_path / "e")

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refit(tmp_path / "e", new, progress=stop)
    assert files(tmp_path / "e") == before
    shutil.copytree(tmp_path / "e", tmp_path / "d")
    damaged = bytearray((tmp_path / "d" / "refit.onnx").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "d" / "refit.onnx").write_bytes(damaged)
    with pytest.raises(EngineError):
        refit(tmp_path / "d", new)
    document = json.loads((tmp_path / "e" / "config.json").read_text())
    assert [part["name"] for part in document["parts"] if "refit" in part["name"]] == ["refit.onnx"]


def test_graphs_are_read_without_words_on_stdout() -> None:
    """As by `ingot build`: the library warns there of bf16, which is kept."""
    program = "import ingot.builder.refit, onnx_graphsurgeon.logger as words; print(words.G_LOGGER.severity)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert int(found.stdout) > G_LOGGER.CRITICAL
