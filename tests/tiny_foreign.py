"""Models that transformers does not have: a twin that it has, and how the other's files store its weights."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]

_INTERNLM2 = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head.": "output.",
}


def twin(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the twin; the same where transformers has the model itself."""
    found = _TWINS.get(config["model_type"])
    return dict(config) if found is None else found(dict(config))


def _without(config: Config, *keys: str) -> Config:
    return {key: value for key, value in config.items() if key not in keys}


def _twin_of_internlm2(config: Config) -> Config:
    return {**_without(config, "bias", "mlp_bias"), "model_type": "llama", "attention_bias": config.get("bias", True)}


def _twin_of_internlm(config: Config) -> Config:
    return _twin_of_internlm2(_without(config, "num_key_value_heads"))


def _twin_of_minicpm(config: Config) -> Config:
    """A Granite has the same factors under other names."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    depth, base = config.get("scale_depth", 1.0), config.get("dim_model_base", 1)
    return {
        **{"tie_word_embeddings": True, **_without(config, "scale_emb", "scale_depth", "dim_model_base")},
        "model_type": "granite",
        "embedding_multiplier": float(config.get("scale_emb", 1.0)),
        "residual_multiplier": 1.0 if depth is None else depth / layers**0.5,
        "attention_multiplier": (hidden / config["num_attention_heads"]) ** -0.5,
        "logits_scaling": 1.0 if base is None else hidden / base,
    }


def _twin_of_orion(config: Config) -> Config:
    return {
        **_without(config, "rms_norm_eps", "partial_rotary_factor"),
        "model_type": "stablelm",
        "partial_rotary_factor": 1.0,
        "layer_norm_eps": config.get("rms_norm_eps", 1e-5),
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
    }


_TWINS: dict[str, Callable[[Config], Config]] = {
    "internlm": _twin_of_internlm,
    "internlm2": _twin_of_internlm2,
    "kimi_k2": lambda config: {**config, "model_type": "deepseek_v3"},
    "mimo": lambda config: {**_without(config, "attention_bias"), "model_type": "qwen2"},
    "minicpm": _twin_of_minicpm,
    "orion": _twin_of_orion,
}


def store(folder: Path, config: Mapping[str, Any]) -> None:
    """Turns the files of the twin into those of the model, if it is another one."""
    if config["model_type"] == "kimi_k2":
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**saved, "model_type": "kimi_k2"}))
    if config["model_type"] not in _STORED:
        return
    path = folder / "model.safetensors"
    save_file(_STORED[config["model_type"]](load_file(path), config), path)
    (folder / "config.json").write_text(json.dumps(dict(config)))


def _internlm2(weights: Weights, config: Mapping[str, Any]) -> Weights:
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    stored, parts = {}, {}
    for name, value in weights.items():
        if found := re.fullmatch(r"(model\.layers\.\d+)\.self_attn\.([qkv])_proj\.(weight|bias)", name):
            parts[found[1], found[3], found[2]] = value.reshape(kv_heads, -1, *value.shape[1:])
            continue
        for theirs, ours in _INTERNLM2.items():
            name = name.replace(theirs, ours)
        stored[name] = value.contiguous()
    for layer, kind, _ in [key for key in parts if key[2] == "q"]:
        together = torch.cat([parts[layer, kind, name] for name in "qkv"], dim=1)
        stored[f"{layer}.attention.wqkv.{kind}"] = together.reshape(-1, *together.shape[2:]).contiguous()
    return stored


def _with_drafts(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """A layer for later tokens, which no one reads."""
    return {**weights, "model.mtp_layers.0.final_layernorm.weight": torch.ones(config["hidden_size"])}


def _as_they_are(weights: Weights, config: Mapping[str, Any]) -> Weights:
    return weights


_STORED: dict[str, Callable[[Weights, Mapping[str, Any]], Weights]] = {
    "internlm2": _internlm2,
    "mimo": _with_drafts,
    **dict.fromkeys(("internlm", "minicpm", "orion"), _as_they_are),
}
