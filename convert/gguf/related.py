"""Architectures of llama.cpp that differ little from a Llama, a Qwen or a mixture of `mixtures.py`."""

import dataclasses

import numpy as np

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Architecture, Config, Stored
from ingot.convert.gguf.dense import biases, plain_norms, scaling_of, twin, window_kinds
from ingot.convert.gguf.mixtures import narrow, qwen3_moe, routed
from ingot.convert.gguf.settings import (
    SIGMOID,
    expert_size,
    has,
    layer_count,
    leading_dense,
    one_of_all,
    require,
    rms_model,
    rope,
    sizes,
    taken_experts,
)
from ingot.convert.weights import Expr, Take


def _of_images(keys: Section) -> None:
    """Settings of images: parts of a position, which are equal in a text, and layers that take features of images."""
    for key in ("rope.dimension_sections", "n_deepstack_layers"):
        keys.has(key)


def _qwen2_vl(keys: Section, stored: Stored) -> Config:
    _of_images(keys)
    one_of_all(keys)
    return {"model_type": "qwen2", **rms_model(keys, stored)}


def _qwen3_vl(keys: Section, stored: Stored) -> Config:
    return {**_qwen2_vl(keys, stored), "model_type": "qwen3"}


def _qwen3_vl_moe(keys: Section, stored: Stored) -> Config:
    _of_images(keys)
    return qwen3_moe(keys, stored)


def _exaone(keys: Section, stored: Stored) -> Config:
    """A Llama but for the key of its epsilon, which some converters call that of a layer norm."""
    if not keys.has("attention.layer_norm_rms_epsilon"):
        keys = keys.called({"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"})
    return {"model_type": "llama", **rms_model(keys, stored)}


def _internlm2(keys: Section, stored: Stored) -> Config:
    one_of_all(keys)
    found = rms_model(keys, stored)
    del found["head_dim"]
    return {"model_type": "internlm2", **found, "bias": has(stored, "attn_q.bias")}


def _minicpm(keys: Section, stored: Stored) -> Config:
    found = rms_model(keys, stored)
    del found["head_dim"]
    hidden, layers = int(str(found["hidden_size"])), int(str(found["num_hidden_layers"]))
    return {
        "model_type": "minicpm",
        **found,
        "scale_emb": keys.number("embedding_scale", above=0),
        "scale_depth": keys.number("residual_scale", above=0) * layers**0.5,
        "dim_model_base": round(hidden / keys.number("logit_scale", above=0)),
    }


def _layer_norms(keys: Section, stored: Stored, model_type: str, eps_key: str) -> Config:
    """A Llama with layer norms."""
    one_of_all(keys)
    for key in ("tensor_data_layout", "attention.layer_norm_rms_epsilon"):  # the same epsilon once more
        keys.has(key)
    found = sizes(keys, stored)
    head_dim = int(str(found["head_dim"]))
    eps = keys.number("attention.layer_norm_epsilon", above=0)
    return {"model_type": model_type, **found, **rope(keys, head_dim), eps_key: eps}


def _orion(keys: Section, stored: Stored) -> Config:
    found = _layer_norms(keys, stored, "orion", "rms_norm_eps")
    del found["head_dim"]
    return found


def _falcon(keys: Section, stored: Stored) -> Config:
    """One norm before both branches, or one for each. Queries of all heads lie before all keys."""
    found = sizes(keys, stored)
    keys.has("tensor_data_layout")
    require(keys, "rope.dimension_count", found["head_dim"])
    heads = int(str(found["num_attention_heads"]))
    kept = ("hidden_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings")
    return {
        "model_type": "falcon",
        **{key: found[key] for key in kept},
        "num_attention_heads": heads,
        "num_kv_heads": found["num_key_value_heads"],
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if has(stored, "attn_norm_2.weight") else 1,
        "ffn_hidden_size": found["intermediate_size"],
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "bias": has(stored, "attn_qkv.bias"),
    }


def _norms_of_falcon(model: ModelConfig) -> dict[str, Expr]:
    """The second norm is that of attention."""
    named = {} if model.shared_norm else {"mlp_norm": "attn_norm", "attn_norm": "attn_norm_2"}
    return {
        f"layers.{{i}}/{ours}/{kind}": Take(f"blk.{{i}}.{theirs}.{kind}")
        for ours, theirs in named.items()
        for kind in ("weight", "bias")
    }


def _mpt(keys: Section, stored: Stored) -> Config:
    """One norm before each branch, and scores that fall with the distance."""
    found = sizes(keys, stored)
    require(keys, "attention.head_count_kv", found["num_attention_heads"])
    require(keys, "feed_forward_length", 4 * int(str(found["hidden_size"])))
    require(keys, "attention.clamp_kqv", 0.0)
    keys.number("attention.max_alibi_bias")  # without it positions would be learned
    require(keys, "attention.max_alibi_bias", 8.0)
    return {
        "model_type": "mpt",
        "d_model": found["hidden_size"],
        "n_heads": found["num_attention_heads"],
        "n_layers": found["num_hidden_layers"],
        "max_seq_len": found["max_position_embeddings"],
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon", above=0),
        "tie_word_embeddings": found["tie_word_embeddings"],
    }


def _olmo(keys: Section, stored: Stored) -> Config:
    """Norms without weights, whose epsilon the family fixes."""
    found = sizes(keys, stored)
    one_of_all(keys)
    require(keys, "expert_count", 0)
    require(keys, "attention.clamp_kqv", 0.0)
    require(keys, "attention.layer_norm_epsilon", 1e-5, float(np.float32(1e-5)))
    return {"model_type": "olmo", **found, **rope(keys, int(str(found["head_dim"])))}


def _deepseek(keys: Section, stored: Stored) -> Config:
    """llama.cpp takes the shares of the taken experts as they are."""
    require(keys, "expert_weights_scale", 0.0, 1.0)
    require(keys, "expert_weights_norm", False)
    return {
        "model_type": "deepseek",
        **rms_model(keys, stored),
        **taken_experts(keys, "n_routed_experts"),
        "moe_intermediate_size": expert_size(keys, stored),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "first_k_dense_replace": leading_dense(keys, stored, layer_count(keys)),
    }


def _cohere2_moe(keys: Section, stored: Stored) -> Config:
    """Layers without experts come first, and rotate. The width of their MLP is in no setting."""
    found = sizes(keys, stored)
    require(keys, "rope.scaling.type", "none")
    require(keys, "rope.dimension_count", found["head_dim"])
    require(keys, "expert_gating_func", SIGMOID)
    require(keys, "expert_weights_scale", 0.0, 1.0)
    keys.has("expert_shared_feed_forward_length")
    layers = layer_count(keys)
    first = leading_dense(keys, stored, layers)
    wide = stored.get("blk.0.ffn_up.weight")
    eps = {"layer_norm_eps": "attention.layer_norm_epsilon", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
    return {
        "model_type": "cohere2_moe",
        **found,
        **taken_experts(keys),
        "intermediate_size": expert_size(keys, stored),
        **({} if wide is None else {"prefix_dense_intermediate_size": wide.shape[0]}),
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "num_shared_experts": keys.integer("expert_shared_count", 0),
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        **{ours: keys.number(theirs, above=0) for ours, theirs in eps.items() if keys.has(theirs)},
        "logit_scale": keys.number("logit_scale", above=0),
        "sliding_window": keys.integer("attention.sliding_window", minimum=1),
        "layer_types": window_kinds(keys, 4),
    }


def _chatglm(keys: Section, stored: Stored) -> Config:
    keys.has("add_bos_token")
    found = {"model_type": "glm", **rms_model(keys, stored)}
    return {**found, "attention_bias": has(stored, "attn_qkv.bias") or has(stored, "attn_q.bias")}


def _one_qkv(model: ModelConfig, stored: Stored) -> ModelConfig:
    """Queries, keys and values in one product, where the file has them so."""
    return dataclasses.replace(model, fused_qkv=has(stored, "attn_qkv.weight"))


def _afmoe(keys: Section, stored: Stored) -> Config:
    """Each fourth layer has no window and does not rotate, and embeddings grow with the width: no setting says so."""
    found = {"model_type": "afmoe", **rms_model(keys, stored), **taken_experts(keys)}
    require(keys, "expert_gating_func", SIGMOID)
    require(keys, "expert_weights_norm", True)
    return {
        **found,
        "moe_intermediate_size": expert_size(keys, stored),
        "num_shared_experts": keys.integer("expert_shared_count", minimum=1),
        "num_dense_layers": leading_dense(keys, stored, layer_count(keys)),
        "route_scale": keys.number("expert_weights_scale", 1.0, above=0),
        "sliding_window": keys.integer("attention.sliding_window", minimum=1),
        "layer_types": window_kinds(keys, 4),
        "mup_enabled": True,
    }


def _beside_shared(keys: Section, stored: Stored, model_type: str, count_key: str, shared_key: str) -> Config:
    """Experts scored by sigmoids beside shared ones, behind first layers without."""
    require(keys, "expert_gating_func", SIGMOID)
    keys.has("expert_shared_feed_forward_length")
    return {
        "model_type": model_type,
        **rms_model(keys, stored),
        **taken_experts(keys, count_key),
        **routed(keys),
        "moe_intermediate_size": expert_size(keys, stored),
        shared_key: keys.integer("expert_shared_count", minimum=1),
        "first_k_dense_replace": leading_dense(keys, stored, layer_count(keys)),
    }


def _dots1(keys: Section, stored: Stored) -> Config:
    found = _beside_shared(keys, stored, "dots1", "n_routed_experts", "n_shared_experts")
    return {**found, "sliding_window": None, "attention_bias": has(stored, "attn_q.bias")}


def _exaone_moe(keys: Section, stored: Stored) -> Config:
    found = _beside_shared(keys, stored, "exaone_moe", "num_experts", "num_shared_experts")
    window = keys.integer("attention.sliding_window", minimum=1)
    return {**found, "sliding_window": window, "layer_types": window_kinds(keys, 4)}


def _mellum(keys: Section, stored: Stored) -> Config:
    """A scaling of the rotation is that of the layers without a window."""
    found = narrow(keys, stored, "mellum")
    theta, scaling = found.pop("rope_theta"), scaling_of(found)
    window = keys.integer("attention.sliding_window", 0)
    layers = layer_count(keys)
    local = keys.number("rope.freq_base_swa", 0.0) or theta
    found.setdefault("intermediate_size", found["moe_intermediate_size"])
    return {
        **found,
        "norm_topk_prob": True,
        "mlp_layer_types": ["sparse"] * layers,
        "sliding_window": window or None,
        "layer_types": window_kinds(keys, 4) if window else ["full_attention"] * layers,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _jais2(keys: Section, stored: Stored) -> Config:
    return _layer_norms(keys, stored, "jais2", "layer_norm_eps")


def _nemotron(keys: Section, stored: Stored) -> Config:
    return _layer_norms(keys, stored, "nemotron", "norm_eps")


def _offset_norms(model: ModelConfig, stored: Stored) -> ModelConfig:
    return plain_norms(biases(model, stored), stored)


RELATED: dict[str, Architecture] = {
    "qwen2vl": Architecture(config=_qwen2_vl, adapt=biases),
    "qwen3vl": Architecture(config=_qwen3_vl, adapt=biases),
    "qwen3vlmoe": Architecture(config=_qwen3_vl_moe, adapt=biases),
    "arcee": twin("arcee", paired=True),
    "exaone": Architecture(config=_exaone, adapt=biases),
    "internlm2": Architecture(config=_internlm2, paired=True, adapt=biases),
    "minicpm": Architecture(config=_minicpm, paired=True, adapt=biases),
    "orion": Architecture(config=_orion, adapt=biases),
    "jais2": Architecture(config=_jais2, adapt=biases),
    "nemotron": Architecture(config=_nemotron, adapt=_offset_norms),
    "falcon": Architecture(config=_falcon, rows=_norms_of_falcon),
    "chatglm": Architecture(config=_chatglm, adapt=_one_qkv),
    "mpt": Architecture(config=_mpt),
    "olmo": Architecture(config=_olmo, paired=True, adapt=biases),
    "deepseek": Architecture(config=_deepseek, paired=True),
    "cohere2moe": Architecture(config=_cohere2_moe),
    "afmoe": Architecture(config=_afmoe, names={"attn/gate": "attn_gate"}),
    "dots1": Architecture(config=_dots1),
    "exaone-moe": Architecture(config=_exaone_moe),
    "mellum": Architecture(config=_mellum),
}
