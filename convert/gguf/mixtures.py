"""Architectures of llama.cpp with mixtures of experts, and Gemma 4, which has them in one of its sizes."""

from ingot.configs.model import LatentConfig, ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Architecture, Config, Stored
from ingot.convert.gguf.dense import biases, granite_factors, scaling_of, window_kinds
from ingot.convert.gguf.settings import (
    SIGMOID,
    SOFTMAX,
    expert_size,
    has,
    layer_count,
    layers_with,
    leading_dense,
    one_of_all,
    per_layer,
    require,
    rms_model,
    sizes,
    taken_experts,
    whole,
)
from ingot.convert.weights import Concat, Expr, OneOf, Shaped, Take, Transpose


def narrow(keys: Section, stored: Stored, model_type: str) -> Config:
    """Experts of a width of their own, and nothing beside them."""
    one_of_all(keys)
    return {
        "model_type": model_type,
        **rms_model(keys, stored),
        **taken_experts(keys),
        "moe_intermediate_size": expert_size(keys, stored),
    }


def qwen3_moe(keys: Section, stored: Stored) -> Config:
    """llama.cpp makes the weights of the taken experts sum to 1 in this architecture."""
    found = narrow(keys, stored, "qwen3_moe")
    found.setdefault("intermediate_size", found["moe_intermediate_size"])
    return {**found, "norm_topk_prob": True, "decoder_sparse_step": 1}


def _qwen2_moe(keys: Section, stored: Stored) -> Config:
    found = narrow(keys, stored, "qwen2_moe")
    found.setdefault("intermediate_size", found["moe_intermediate_size"])
    shared = keys.integer("expert_shared_feed_forward_length", minimum=1)
    return {**found, "shared_expert_intermediate_size": shared, "norm_topk_prob": False, "decoder_sparse_step": 1}


def _olmoe(keys: Section, stored: Stored) -> Config:
    one_of_all(keys)
    found = {"model_type": "olmoe", **rms_model(keys, stored), **taken_experts(keys), "norm_topk_prob": False}
    return {**found, "intermediate_size": expert_size(keys, stored)}


def _granitemoe(keys: Section, stored: Stored) -> Config:
    shared = keys.integer("expert_shared_feed_forward_length", 0)
    counts = taken_experts(keys, "num_local_experts")
    found = {"model_type": "granitemoe", **rms_model(keys, stored), **granite_factors(keys), **counts}
    return {**found, "model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else found


def _gpt_oss(keys: Section, stored: Stored) -> Config:
    """Every other layer has a window, and the rotation is not rounded to whole pairs: no setting says either."""
    one_of_all(keys)
    found = {"model_type": "gpt_oss", **rms_model(keys, stored), **taken_experts(keys, "num_local_experts")}
    theta, scaling = found.pop("rope_theta"), scaling_of(found)
    return {
        **found,
        "intermediate_size": expert_size(keys, stored),
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta, "truncate": False},
        "sliding_window": keys.integer("attention.sliding_window", minimum=1),
        "layer_types": window_kinds(keys, 2),
        "attention_bias": True,
    }


def routed(keys: Section, *, scale_key: str = "routed_scaling_factor") -> Config:
    """The router of GLM and DeepSeek."""
    found: Config = {
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        scale_key: keys.number("expert_weights_scale", 1.0, above=0),
    }
    for theirs, ours in (("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")):
        if keys.has(theirs):
            found[ours] = keys.integer(theirs, minimum=1)
    return found


def _glm4_moe(keys: Section, stored: Stored) -> Config:
    require(keys, "expert_gating_func", SIGMOID)
    return {
        "model_type": "glm4_moe",
        **rms_model(keys, stored),
        **taken_experts(keys, "n_routed_experts"),
        **routed(keys),
        "moe_intermediate_size": expert_size(keys, stored),
        "n_shared_experts": keys.integer("expert_shared_count", minimum=1),
        "first_k_dense_replace": leading_dense(keys, stored, layer_count(keys)),
        "use_qk_norm": has(stored, "attn_q_norm.weight"),
        "attention_bias": has(stored, "attn_q.bias"),
    }


def latent_model(keys: Section, stored: Stored, value_dim: int | None = None) -> Config:
    """A model with latent attention, its experts left out. value_dim: of a head, where no setting says it."""
    inner = {key: keys.raw(key) for key in _OF_HEADS if keys.has(key)}
    heads = Section(inner, keys.where)
    rank = heads.integer("attention.kv_lora_rank", minimum=1)
    turning = keys.integer("rope.dimension_count", minimum=1)
    width = heads.integer("attention.key_length_mla", heads.integer("attention.key_length"))
    if value_dim is None:
        value_dim = heads.integer("attention.value_length_mla", heads.integer("attention.value_length", 0), minimum=1)
    count = whole(keys, "attention.head_count")
    shape = {"attention.head_count": count, "attention.head_count_kv": count, "attention.key_length": turning}
    plain = Section({**{key: keys.raw(key) for key in _PLAIN if keys.has(key)}, **shape}, keys.where)
    keys.has("attention.head_count_kv")
    found = rms_model(plain, stored, mscale=10.0)
    del found["head_dim"]
    theta, scaling = found.pop("rope_theta"), scaling_of(found)
    return {
        **found,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": theta},
        "q_lora_rank": heads.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": width - turning,
        "v_head_dim": value_dim,
    }


def _deepseek2(keys: Section, stored: Stored) -> Config:
    """Its second generation scores by softmax, the third by sigmoid, as do GLM 4.7 Flash and Kimi K2. Youtu has no
    experts; llama.cpp's converter writes some of their settings nevertheless."""
    found = latent_model(keys, stored)
    if not keys.integer("expert_count", 0):
        for key in ("leading_dense_block_count", "expert_feed_forward_length", "expert_weights_scale"):
            keys.has(key)
        require(keys, "expert_shared_count", 0)
        return {"model_type": "youtu", **found}
    score = keys.integer("expert_gating_func", SIGMOID if has(stored, "exp_probs_b.bias") else SOFTMAX)
    third = score == SIGMOID
    require(keys, "expert_gating_func", SIGMOID, SOFTMAX)
    return {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        **found,
        **taken_experts(keys, "n_routed_experts"),
        **routed(keys),
        **({} if third else {"topk_method": "greedy"}),
        "moe_intermediate_size": expert_size(keys, stored),
        "n_shared_experts": keys.integer("expert_shared_count", minimum=1),
        "first_k_dense_replace": leading_dense(keys, stored, layer_count(keys)),
    }


_OF_HEADS = (
    *("attention.kv_lora_rank", "attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla"),
    *("attention.key_length", "attention.value_length"),
)
_PLAIN = (
    *("block_count", "nextn_predict_layers", "context_length", "embedding_length", "feed_forward_length"),
    *("vocab_size", "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "rope.scaling.attn_factor"),
)


def latent_rows(model: ModelConfig) -> dict[str, Expr]:
    """Keys and values in one product or, in newer files, in two that are stored for absorbed attention."""
    latent = model.latent
    assert isinstance(latent, LatentConfig), "the family has one"
    parts = Transpose(Take("blk.{i}.attn_k_b.weight")), Take("blk.{i}.attn_v_b.weight")
    shape = (model.heads * (latent.key_dim + latent.value_dim), latent.kv_rank)
    apart = Shaped(Concat(parts, axis=1), shape)
    return {
        "layers.{i}/attn/kv/weight": OneOf((Take("blk.{i}.attn_kv_b.weight"), apart)),
        **({"layers.{i}/attn/q/weight": Take("blk.{i}.attn_q_b.weight")} if latent.q_rank else {}),
    }


def _minimax_m2(keys: Section, stored: Stored) -> Config:
    require(keys, "expert_gating_func", SIGMOID)
    found = {"model_type": "minimax_m2", **rms_model(keys, stored), **taken_experts(keys, "num_local_experts")}
    part = found.pop("partial_rotary_factor", 1.0)
    assert isinstance(part, float), "rope writes it"
    head_dim = int(str(found["head_dim"]))
    return {**found, "intermediate_size": expert_size(keys, stored), "rotary_dim": round(part * head_dim)}


def _hy_v3(keys: Section, stored: Stored) -> Config:
    require(keys, "expert_gating_func", SIGMOID)
    require(keys, "expert_weights_norm", True)
    found = {"model_type": "hy_v3", **rms_model(keys, stored), **taken_experts(keys)}
    width = expert_size(keys, stored)
    sparse = layers_with(stored, "ffn_gate_inp.weight", layer_count(keys))
    keys.has("leading_dense_block_count")
    return {
        **found,
        "moe_intermediate_size": width,
        "num_shared_experts": keys.integer("expert_shared_feed_forward_length", width) // width,
        "router_scaling_factor": keys.number("expert_weights_scale", 1.0, above=0),
        "mlp_layer_types": ["sparse" if each else "dense" for each in sparse],
    }


def _ernie4_5_moe(keys: Section, stored: Stored) -> Config:
    found = {"model_type": "ernie4_5_moe", **rms_model(keys, stored)}
    layers = layer_count(keys)
    keys.has("expert_shared_feed_forward_length")  # llama.cpp's converter writes another width than the tensors have
    return {
        **found,
        "moe_num_experts": keys.integer("expert_count", minimum=1),
        "moe_k": keys.integer("expert_used_count", minimum=1),
        "moe_intermediate_size": expert_size(keys, stored),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1, minimum=1),
        "moe_layer_end_index": layers - 1,
    }


def _gemma4(keys: Section, stored: Stored) -> Config:
    """Layers without a window have heads of their own; some of them keys that are their values too."""
    layers = layer_count(keys)
    kinds = window_kinds(keys, 6)
    full = [kind == "full_attention" for kind in kinds]
    heads = per_layer(keys, "attention.head_count_kv", layers)
    shares = keys.integer("attention.shared_kv_layers", 0)
    head_dim = keys.integer("attention.key_length_swa", minimum=1)
    for key, usual in (("attention.value_length_swa", head_dim), ("rope.dimension_count_swa", head_dim)):
        require(keys, key, usual)
    ups = [stored[name].shape[0] for layer in range(layers) if (name := f"blk.{layer}.ffn_up.weight") in stored]
    keys.has("feed_forward_length")
    without = [layer for layer in range(layers - shares) if full[layer] and f"blk.{layer}.attn_v.weight" not in stored]
    plain = {key: keys.raw(key) for key in _OF_GEMMA if keys.has(key)}
    window_heads = next((count for count, each in zip(heads, full, strict=True) if not each), heads[0])
    found = sizes(Section({**plain, "attention.head_count_kv": window_heads}, keys.where), stored)
    full_dim = found.pop("head_dim")
    require(keys, "rope.dimension_count", full_dim)
    table = stored.get("per_layer_token_embd.weight")
    experts = keys.integer("expert_count", 0)
    moe: Config = {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": keys.integer("expert_used_count", 0),
        "moe_intermediate_size": expert_size(keys, stored) if experts else 0,
    }
    return {
        "model_type": "gemma4_text",
        **found,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", above=0),
        "intermediate_size": ups[0] if ups else 0,
        "use_double_wide_mlp": bool(ups) and ups[-1] == 2 * ups[0],
        "head_dim": head_dim,
        "global_head_dim": full_dim,
        "num_global_key_value_heads": next((count for count, each in zip(heads, full, strict=True) if each), None),
        "attention_k_eq_v": bool(without),
        "layer_types": kinds,
        "sliding_window": keys.integer("attention.sliding_window", minimum=1),
        "num_kv_shared_layers": shares,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": keys.number("rope.freq_base", 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)},
        },
        **(moe if experts else {}),
    }


_OF_GEMMA = (
    *("block_count", "context_length", "embedding_length", "vocab_size", "attention.head_count"),
    *("attention.key_length", "attention.value_length"),
)
_OF_FULL_LAYERS = {
    "moe_norm": "pre_ffw_norm_2",
    "mlp_branch_norm": "post_ffw_norm_1",
    "moe_branch_norm": "post_ffw_norm_2",
}
_OF_GEMMA4: dict[str, Expr] = {
    "layers.{i}/scale": Take("blk.{i}.layer_output_scale.weight"),
    "layers.{i}/moe/router_norm/weight": Take("blk.{i}.ffn_gate_inp.scale"),
    "layers.{i}/moe/down/scale": Take("blk.{i}.ffn_down_exps.scale"),
}

MIXTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture(config=_qwen2_moe, adapt=biases),
    "qwen3moe": Architecture(config=qwen3_moe, adapt=biases),
    "olmoe": Architecture(config=_olmoe, adapt=biases),
    "granitemoe": Architecture(config=_granitemoe, paired=True, adapt=biases),
    "gpt-oss": Architecture(config=_gpt_oss, names={"mlp_norm": "post_attention_norm"}),
    "glm4moe": Architecture(config=_glm4_moe, names={"mlp_norm": "post_attention_norm"}),
    "deepseek2": Architecture(config=_deepseek2, rows=latent_rows),
    "minimax-m2": Architecture(config=_minimax_m2),
    "hy_v3": Architecture(config=_hy_v3),
    "ernie4_5-moe": Architecture(config=_ernie4_5_moe),
    "gemma4": Architecture(
        config=_gemma4, names=_OF_FULL_LAYERS, rows=lambda model: _OF_GEMMA4, scales=(".ffn_down_exps.scale",)
    ),
}
