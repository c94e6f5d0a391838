"""Sarvam's models as their makers' files are: other names, queries, keys and values in one matrix, deepseek_yarn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from tests.convert.test_golden import TOLERANCE
from tests.graph_logits import logits_of_graph
from tests.tiny import TinyModel, tiny_model

NAMES = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "gate.e_score_correction_bias": "gate.expert_bias",
}


def assert_converts(model: TinyModel, folder: Path) -> None:
    convert(ConvertOptions(model_dir=folder, output_dir=folder.parent / "checkpoint"))
    ids = np.random.default_rng(5).integers(0, 61, (1, 30))
    expected = model.logits(ids)
    found = logits_of_graph(folder.parent / "checkpoint", ids)
    assert np.abs(found - expected).max() < TOLERANCE * np.ptp(expected)


def rewrite(folder: Path, changes: dict[str, Any], *absent: str) -> None:
    """config.json with other keys."""
    file = folder / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in absent}
    file.write_text(json.dumps({**config, **changes}))


def test_names_of_the_30b(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    model = tiny_model(folder, {**find_family("sarvam_moe").tiny, "attention_bias": False})
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".self_attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"]
        tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = np.concatenate(parts)
    for ours, theirs in NAMES.items():
        tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    changes = {"num_experts": 12, "num_shared_experts": 1, "use_qkv_bias": False}
    rewrite(folder, changes, "n_routed_experts", "n_shared_experts", "attention_bias")
    assert_converts(model, folder)


def test_scaling_of_the_105b(tmp_path: Path) -> None:
    """The configuration's head_dim is that of a row of the cache."""
    folder = tmp_path / "m"
    model = tiny_model(folder, dict(find_family("sarvam_mla").tiny))
    rope = dict(json.loads((folder / "config.json").read_text())["rope_parameters"])
    theta = rope.pop("rope_theta")
    rope = {key: value for key, value in rope.items() if key != "rope_type"} | {"type": "deepseek_yarn"}
    changes = {"rope_scaling": rope, "rope_theta": theta, "head_dim": 28, "q_head_dim": 20, "num_experts": 12}
    rewrite(folder, {**changes, "num_shared_experts": 1}, "rope_parameters", "n_routed_experts", "n_shared_experts")
    assert_converts(model, folder)
