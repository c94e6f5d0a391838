"""Configurations of real models, shrunk in size alone: their logits against transformers, or why they are refused.

python -m tests.programs.real_configs FILE.json [FILE.json ...]

For each config.json: every option stays, sizes become small, weights are random; the exported graph in onnxruntime has
the logits of transformers. Of a wrapper for images the text model is taken. A line for each file: how far the logits
are off, or the reason for which ingot refuses the model. Exits with 1 where logits differ, or something else fails.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.configs.convert import ConvertOptions
from ingot.configs.read import Section
from ingot.convert.convert import convert
from ingot.convert.family import read_model
from ingot.convert.wrapped import text_section
from ingot.errors import IngotError
from tests.graph_logits import logits_of_graph
from tests.tiny import tiny_model

Config = dict[str, Any]
LENGTH = 40
TOLERANCE, TOLERANCE_OF_STATES = 1e-5, 5e-5  # of the range of the logits
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "activation_sparsity_pattern")
_SMALL: Config = {
    **{"vocab_size": 61, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8, "laurel_rank": 6},
    **{"intermediate_size": 40, "ffn_dim": 40, "ffn_hidden_size": 40, "n_inner": 40, "block_ff_dim": 40},
    **{"moe_intermediate_size": 20, "shared_expert_intermediate_size": 20, "shared_intermediate_size": 20},
    **{"moe_shared_expert_intermediate_size": 20, "moe_latent_size": 24, "sliding_window": 8},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12},
    **{"n_positions": 64, "n_ctx": 64, "seq_length": 64, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2},
    **{"ssm_state_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2, "expand": 2, "rotary_dim": 8},
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "experts_per_token")
_HEADS = {"num_attention_heads": "num_key_value_heads", "n_head": "num_kv_heads"}


def shrunk(config: Mapping[str, Any]) -> Config:
    """All options with small sizes."""
    dropped = ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype")
    small = {key: value for key, value in config.items() if not key.endswith("_token_id") and key not in dropped}
    small |= {key: value for key, value in _SMALL.items() if small.get(key)}
    small |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {**small, **_layers(small), **_heads(small), **_experts(small), **_rotations(small)}


def _layers(config: Config) -> Config:
    """The first layers, so many that each kind is there; two at least."""
    lists = {key: config[key] for key in _BY_LAYER if isinstance(config.get(key), list)}
    count = 2
    for kinds in lists.values():
        count = max(count, 1 + max(kinds.index(kind) for kind in set(kinds)))
    letters = config.get("hybrid_override_pattern")
    if letters:
        count = max(count, 1 + max(letters.index(kind) for kind in set(letters)))
        return {"hybrid_override_pattern": letters[:count], "num_hidden_layers": count}
    count = max(count, config.get("full_attention_interval") or 0, (config.get("first_k_dense_replace") or 0) + 1)
    if isinstance(config.get("sliding_window_pattern"), int):
        count = max(count, config["sliding_window_pattern"])
    if config.get("num_kv_shared_layers"):
        count = len(config["layer_types"])
    named = {name: kinds[:count] for name, kinds in lists.items()}
    key = next((key for key in ("num_hidden_layers", "n_layer", "n_layers") if config.get(key)), None)
    return named if key is None else {**named, key: min(count, config[key])}


def _heads(config: Config) -> Config:
    """Few heads of few dimensions, with the model's number of query heads for a key head up to eight."""
    key = next((key for key in _HEADS if config.get(key)), None)
    if key is None:
        return {}
    count, kv_key = config[key], _HEADS[key]
    if config.get("kv_lora_rank"):
        return {key: 4, "hidden_size": 48, **({kv_key: 4} if kv_key in config else {})}
    shared = min(max(count // (config.get(kv_key) or count), 1), 8)
    kv_heads = 1 if shared > 2 else 2
    found: Config = {key: kv_heads * shared, **({kv_key: kv_heads} if config.get(kv_key) else {})}
    width = next(name for name in ("hidden_size", "n_embd") if name in config)
    if config.get("head_dim"):
        found |= {"head_dim": 16, width: 48}
    else:
        found[width] = 16 * found[key]
    if config.get("global_head_dim"):
        found |= {"global_head_dim": 32, "num_global_key_value_heads": config.get("num_global_key_value_heads") and 1}
    return found


def _experts(config: Config) -> Config:
    groups = config.get("n_group") or 1
    count, taken = (16, 6) if groups > 1 else (8, 3)
    found = {key: count for key in _EXPERTS if config.get(key)}
    found |= {key: min(config[key], taken) for key in _TAKEN if config.get(key)}
    return found


def _rotations(config: Config) -> Config:
    """Factors of each frequency for the small heads."""
    found = {}
    for outer in ("rope_scaling", "rope_parameters"):
        scaling = config.get(outer)
        if isinstance(scaling, dict) and any(isinstance(each, list) for each in scaling.values()):
            kept = {key: each for key, each in scaling.items() if key != "mrope_section"}
            pairs = int(16 * config.get("partial_rotary_factor", 1.0)) // 2
            found[outer] = {key: each[:pairs] if isinstance(each, list) else each for key, each in kept.items()}
    return found


def text_config(config: Config) -> Config:
    """That of the text model of a wrapper, with the wrapper's defaults; any other as it is."""
    return text_section(Section(config, "config.json"), None)[0].values()


def off(config: Config, work: Path) -> tuple[float, float]:
    """(how far the graph's logits are from those of transformers, in parts of their range; what is allowed).

    Raises IngotError for a model that ingot refuses, whole or shrunk.
    """
    read_model(Section(config, "config.json"), None)
    model = tiny_model(work / "m", shrunk(text_config(config)))
    report = convert(ConvertOptions(model_dir=model.folder, output_dir=work / "c"))
    ids = np.random.default_rng(3).integers(0, 61, (1, LENGTH))
    expected = model.logits(ids)
    found = float(np.abs(logits_of_graph(work / "c", ids) - expected).max() / np.ptp(expected))
    sensitive = report.model.mixer is not None or report.model.streams is not None
    return found, TOLERANCE_OF_STATES if sensitive else TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path)
    failed = 0
    for file in parser.parse_args().files:
        config = json.loads(file.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as work:
            try:
                worst, allowed = off(config, Path(work))
            except IngotError as problem:
                print(f"{file.name}: refused: {str(problem).splitlines()[0]}", flush=True)
                continue
            except Exception as problem:
                print(f"{file.name}: FAILED: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                failed += 1
                continue
        print(f"{file.name}: {config['model_type']} {worst:.1e}{' DIFFERS' * (worst > allowed)}", flush=True)
        failed += worst > allowed
    return int(failed > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
