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


def _twin_of_deepseek(config: Config) -> Config:
    """Qwen 2's mixtures have a gate behind the shared expert: `settle` makes it one half for all tokens."""
    layers, first, every = (int(config.get(key, usual)) for key, usual in _DENSE_OF_DEEPSEEK.items())
    experts, taken = config.get("n_routed_experts"), config.get("num_experts_per_tok") or 1
    dense = [layer for layer in range(layers) if experts is None or layer < first or layer % every]
    inner = config.get("moe_intermediate_size", 1407)
    return {
        **{"intermediate_size": 11008, "max_position_embeddings": 2048},
        **_without(config, "moe_intermediate_size", "attention_bias", *_KEYS_OF_DEEPSEEK),
        "model_type": "qwen2_moe",
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "qkv_bias": config.get("attention_bias", False),
        "use_sliding_window": False,
        "layer_types": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "num_experts": experts or 2,
        "num_experts_per_tok": taken,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * (config.get("n_shared_experts") or 1),
        "norm_topk_prob": config.get("norm_topk_prob", False) and taken > 1,
    }


_DENSE_OF_DEEPSEEK = {"num_hidden_layers": 30, "first_k_dense_replace": 0, "moe_layer_freq": 1}
_KEYS_OF_DEEPSEEK = (
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "mlp_only_layers"),
    *("num_local_experts", "num_experts", "sliding_window", "decoder_sparse_step", "use_sliding_window", "layer_types"),
)


def _twin_of_chatglm(config: Config) -> Config:
    theta = 1e4 * config.get("rope_ratio", 1)
    return {
        "model_type": "glm",
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "vocab_size": config["padded_vocab_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_hidden_layers": config["num_layers"],
        "num_key_value_heads": config.get("multi_query_group_num", 1),
        "head_dim": config.get("kv_channels", 128),
        "max_position_embeddings": config.get("seq_length", 2048),
        "rms_norm_eps": config.get("layernorm_epsilon", 1e-5),
        "attention_bias": config.get("add_qkv_bias", False),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
        **{key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config},
    }


_TWINS: dict[str, Callable[[Config], Config]] = {
    "chatglm": _twin_of_chatglm,
    "deepseek": _twin_of_deepseek,
    "internlm": _twin_of_internlm,
    "internlm2": _twin_of_internlm2,
    "kimi_k2": lambda config: {**config, "model_type": "deepseek_v3"},
    "mimo": lambda config: {**_without(config, "attention_bias"), "model_type": "qwen2"},
    "minicpm": _twin_of_minicpm,
    "orion": _twin_of_orion,
}


def settle(model: Any, config: Mapping[str, Any]) -> None:
    """Sets parameters of the twin that the model does not have, so that they do as good as nothing."""
    if config["model_type"] != "deepseek":
        return
    shared = "shared_expert_gate" if config.get("n_shared_experts") else "shared_expert"
    for name, parameter in model.named_parameters():
        if shared in name:
            parameter.zero_()


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


def _deepseek(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """The gate of the shared expert is in what it makes; a model without one stores none. Where q has a bias, so has
    the last product of attention, which is zero in the twin."""
    kept = {name: value for name, value in weights.items() if "shared_expert_gate" not in name}
    for name in [name for name in kept if name.endswith("self_attn.q_proj.bias")]:
        kept[name.replace("q_proj", "o_proj")] = torch.zeros(config["hidden_size"])
    if not config.get("n_shared_experts"):
        return {name: value for name, value in kept.items() if "shared_expert" not in name}
    return {
        name.replace("shared_expert.", "shared_experts."): value / 2 if "shared_expert.down_proj" in name else value
        for name, value in kept.items()
    }


_CHATGLM = {
    "model.layers.": "transformer.encoder.layers.",
    "model.embed_tokens.": "transformer.embedding.word_embeddings.",
    "model.norm.": "transformer.encoder.final_layernorm.",
    "lm_head.": "transformer.output_layer.",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _chatglm(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Queries, keys and values in one matrix, and the speeds of the rotation beside them."""
    stored = {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}
    parts: dict[tuple[str, str], Weights] = {}
    for name, value in weights.items():
        for theirs, ours in _CHATGLM.items():
            name = name.replace(theirs, ours)
        if found := re.fullmatch(r"(.+)\.self_attn\.([qkv])_proj\.(weight|bias)", name):
            parts.setdefault((found[1], found[3]), {})[found[2]] = value
        else:
            stored[name] = value
    for (layer, kind), each in parts.items():
        stored[f"{layer}.self_attention.query_key_value.{kind}"] = torch.cat([each[part] for part in "qkv"])
    return stored


def _with_drafts(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """A layer for later tokens, which no one reads."""
    return {**weights, "model.mtp_layers.0.final_layernorm.weight": torch.ones(config["hidden_size"])}


def _as_they_are(weights: Weights, config: Mapping[str, Any]) -> Weights:
    return weights


_STORED: dict[str, Callable[[Weights, Mapping[str, Any]], Weights]] = {
    "chatglm": _chatglm,
    "deepseek": _deepseek,
    "internlm2": _internlm2,
    "mimo": _with_drafts,
    **dict.fromkeys(("internlm", "minicpm", "orion"), _as_they_are),
}
