"""Models that transformers does not have: a twin that it has, and how the other's files store its weights."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]

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
    if config["model_type"] == "kimi_k2":
        return {**config, "model_type": "deepseek_v3"}
    if config["model_type"] != "internlm2":
        return dict(config)
    kept = {key: value for key, value in config.items() if key not in ("bias", "mlp_bias")}
    return {**kept, "model_type": "llama", "attention_bias": config.get("bias", True)}


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


_STORED: dict[str, Callable[[Weights, Mapping[str, Any]], Weights]] = {"internlm2": _internlm2}
