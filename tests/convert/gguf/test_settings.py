"""Settings of GGUF files that ingot does not apply are refused; what it leaves out, it says."""

import dataclasses
import re
from pathlib import Path

import pytest

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.errors import IngotError
from tests.convert.gguf.llama_cpp import Settings
from tests.convert.gguf.test_architectures import CASES, write_case


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention.value_length": 8}, "llama.attention.value_length"),
        ({"attention.head_count": [4, 2]}, "differs from layer to layer"),
        ({"attention.temperature_scale": 0.5}, "does not know(.|\n)*temperature_scale"),
        ({"attention.causal": False}, "llama.attention.causal"),
        ({"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}, "rope_type"),
        ({"block_count": 20000}, "too many layers"),
        ({"embedding_length": 0}, "embedding_length"),
        ({"attention.head_count": 0}, "num_attention_heads"),
        ({"expert_shared_count": 2}, "expert_shared_count"),
        ({"block_count": 3}, "that the files lack"),
        ({"block_count": 1}, "does not ask for"),
        ({"feed_forward_length": 80}, "other shapes"),
    ],
)
def test_settings_that_are_not_applied(tmp_path: Path, settings: Settings, words: str) -> None:
    path, _ = write_case(tmp_path, "llama", dataclasses.replace(CASES["llama, tied"], settings=settings))
    with pytest.raises(IngotError, match=words):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
    assert not (tmp_path / "checkpoint").exists()


def test_a_falcon_h1_whose_factor_of_logits_is_lost(tmp_path: Path) -> None:
    case = dataclasses.replace(CASES["falcon-h1"], change={"tie_word_embeddings": True})
    path, _ = write_case(tmp_path, "falcon-h1", case)
    with pytest.raises(IngotError, match=r"no output\.weight: a factor of its logits is lost"):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))


@pytest.mark.parametrize("distance", [9.0, float("nan")])
def test_gates_that_would_all_be_cut_off(tmp_path: Path, distance: float) -> None:
    settings = {**CASES["gemma3n"].settings, "activation_sparsity_scale": [distance] * 3}
    path, _ = write_case(tmp_path, "gemma3n", dataclasses.replace(CASES["gemma3n"], settings=settings))
    with pytest.raises(IngotError, match="activation_sparsity_scale has a value that is not supported"):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))


def test_what_chooses_tokens_is_left_out(tmp_path: Path) -> None:
    path, _ = write_case(tmp_path, "glm-dsa", CASES["glm-dsa"])
    report = convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
    assert any("10 tensors that choose tokens for sparse attention" in each for each in report.warnings)


@pytest.mark.parametrize(("key", "value"), [("attention.clamp_kqv", 8.0), ("attention.layer_norm_epsilon", 1e-6)])
def test_an_olmo_that_transformers_has_not_is_refused(tmp_path: Path, key: str, value: float) -> None:
    case = CASES["olmo"]
    path, _ = write_case(tmp_path, "olmo", dataclasses.replace(case, settings={**case.settings, key: value}))
    with pytest.raises(IngotError, match=f"{re.escape(key)} has a value that is not supported"):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))


def test_an_mpt_whose_positions_are_learned_is_refused(tmp_path: Path) -> None:
    settings = {**CASES["mpt"].settings, "attention.max_alibi_bias": 0.0}
    path, _ = write_case(tmp_path, "mpt", dataclasses.replace(CASES["mpt"], settings=settings))
    with pytest.raises(IngotError, match=r"attention\.max_alibi_bias has a value that is not supported"):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
