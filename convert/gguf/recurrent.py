"""Architectures of llama.cpp whose layers keep a state, all or some of them."""

import dataclasses
from collections.abc import Mapping

from ingot.configs.mixers import LinearAttentionConfig
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.gguf.architecture import Architecture, Config, Stored
from ingot.convert.gguf.dense import biases, granite_factors
from ingot.convert.gguf.mixtures import routed
from ingot.convert.gguf.settings import (
    SIGMOID,
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
from ingot.convert.weights import Expr, KeyGroups, LogOfMinus, OneOf, Regroup, Shaped, Split, Swapped, Take

_NO_KV = (0,)


def _delta_rule(keys: Section, stored: Stored, model_type: str) -> Config:
    """What Qwen3-Next and Qwen 3.5 share. The parts of a text's position are equal (`dimension_sections`)."""
    layers = layer_count(keys)
    every, listed = keys.integer("full_attention_interval", 4, minimum=1), "attention.recurrent_layers"
    states = per_layer(keys, listed, layers) if keys.has(listed) else [(i + 1) % every != 0 for i in range(layers)]
    heads = keys.integer("ssm.time_step_rank", minimum=1)
    keys.has("rope.dimension_sections")
    one_of_all(keys)
    found = {"model_type": model_type, **rms_model(keys, stored, no_kv=_NO_KV)}
    return {
        **found,
        "layer_types": ["linear_attention" if each else "full_attention" for each in states],
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel", minimum=2),
        "linear_key_head_dim": keys.integer("ssm.state_size", minimum=1),
        "linear_num_key_heads": keys.integer("ssm.group_count", minimum=1),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.integer("ssm.inner_size", minimum=1) // heads,
        "attention_bias": has(stored, "attn_q.bias"),
    }


def _with_experts(keys: Section, stored: Stored, model_type: str) -> Config:
    """Beside experts a shared one, in every layer; llama.cpp makes the weights of those taken sum to 1."""
    found = _delta_rule(keys, stored, model_type)
    found.pop("intermediate_size", None)
    width = expert_size(keys, stored)
    more = {"norm_topk_prob": True, "decoder_sparse_step": 1, "intermediate_size": width}
    return {
        **found,
        **taken_experts(keys),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", minimum=1),
        **(more if model_type == "qwen3_next" else {}),
    }


def _added_norms(model: ModelConfig, stored: Stored) -> ModelConfig:
    return dataclasses.replace(model, norm_offset=0.0)


def _delta_rows(model: ModelConfig) -> dict[str, Expr]:
    """llama.cpp lets the value heads of a key head stand apart: first one of each, then the next of each."""
    mixer = model.mixer
    assert isinstance(mixer, LinearAttentionConfig), "the family has it"
    served, keys = mixer.heads // mixer.key_heads, 2 * mixer.key_heads * mixer.key_dim

    def regrouped(name: str, begin: int = 0, axis: int = 0) -> Expr:
        return Swapped(Take(f"blk.{{i}}.{name}"), served, mixer.key_heads, axis, begin)

    channels = keys + mixer.heads * mixer.value_dim
    return _delta(
        {
            "qkv/weight": regrouped("attn_qkv.weight", keys),
            "z/weight": regrouped("attn_gate.weight"),
            "b/weight": regrouped("ssm_beta.weight"),
            "dt/weight": regrouped("ssm_alpha.weight"),
            "dt/bias": regrouped("ssm_dt.bias"),
            "a_log/weight": LogOfMinus(regrouped("ssm_a")),
            "conv/weight": Shaped(regrouped("ssm_conv1d.weight", keys), (channels, 1, mixer.conv_width)),
            "out/weight": regrouped("ssm_out.weight", axis=1),
        }
    )


def _next_rows(model: ModelConfig) -> dict[str, Expr]:
    """Value heads lie by key heads, in the oldest files queries, keys and gates too."""
    mixer = model.mixer
    assert isinstance(mixer, LinearAttentionConfig), "the family has it"
    channels = 2 * mixer.key_heads * mixer.key_dim + mixer.heads * mixer.value_dim
    joined, parts = Take("blk.{i}.ssm_in.weight"), ("key", "key", "value", "value")
    return _delta(
        {
            "qkv/weight": OneOf((Take("blk.{i}.attn_qkv.weight"), KeyGroups(joined, parts, (0, 1, 2)))),
            "z/weight": OneOf((Take("blk.{i}.attn_gate.weight"), KeyGroups(joined, parts, (3,)))),
            "b/weight": KeyGroups(Take("blk.{i}.ssm_ba.weight"), ("head", "head"), (0,)),
            "dt/weight": KeyGroups(Take("blk.{i}.ssm_ba.weight"), ("head", "head"), (1,)),
            "a_log/weight": LogOfMinus(Take("blk.{i}.ssm_a")),
            "conv/weight": Shaped(Take("blk.{i}.ssm_conv1d.weight"), (channels, 1, mixer.conv_width)),
        }
    )


def _delta(rows: Mapping[str, Expr]) -> dict[str, Expr]:
    """With the products of attention, of each head its query, then its gate."""
    query = {
        f"layers.{{i}}/attn/{name}/{kind}": Split(Regroup(Take(f"blk.{{i}}.attn_q.{kind}"), 2), 2, index)
        for index, name in enumerate(("q", "gate"))
        for kind in ("weight", "bias")
    }
    return query | {f"layers.{{i}}/linear/{name}": expr for name, expr in rows.items()}


def _lfm2(keys: Section, stored: Stored) -> Config:
    layers = layer_count(keys)
    attends = layers_with(stored, "attn_q.weight", layers)
    found = rms_model(keys, stored, no_kv=_NO_KV)
    del found["head_dim"]
    found["norm_eps"] = found.pop("rms_norm_eps")
    return {
        "model_type": "lfm2",
        **found,
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "conv_L_cache": keys.integer("shortconv.l_cache", minimum=2),
        "conv_bias": has(stored, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: Section, stored: Stored) -> Config:
    found = _lfm2(keys, stored)
    del found["block_auto_adjust_ff_dim"]
    require(keys, "expert_gating_func", SIGMOID)
    return {
        **found,
        "model_type": "lfm2_moe",
        **taken_experts(keys),
        "moe_intermediate_size": expert_size(keys, stored),
        "num_dense_layers": leading_dense(keys, stored, layer_count(keys)),
        "use_expert_bias": has(stored, "exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0, above=0),
    }


def _granite_hybrid(keys: Section, stored: Stored) -> Config:
    """What the rotation is "finetuned" for tells whether there is one."""
    layers = layer_count(keys)
    mixes = layers_with(stored, "ssm_in.weight", layers)
    turns = keys.boolean("rope.scaling.finetuned", True)
    heads = keys.integer("ssm.time_step_rank", minimum=1)
    inner = keys.integer("ssm.inner_size", minimum=1)
    kv_heads = _attention_heads(keys, stored)
    found = rms_model(kv_heads, stored)
    for key in _PLAIN:
        keys.has(key)
    experts = keys.integer("expert_count", 0)
    shared = keys.integer("expert_shared_feed_forward_length", 0) or whole(keys, "feed_forward_length")
    counts = taken_experts(keys, "num_local_experts") if experts else {"num_local_experts": 0, "num_experts_per_tok": 0}
    return {
        "model_type": "granitemoehybrid",
        **found,
        **granite_factors(keys),
        **counts,
        "intermediate_size": expert_size(keys, stored) if experts else shared,
        "shared_intermediate_size": shared,
        "layer_types": ["mamba" if each else "attention" for each in mixes],
        "position_embedding_type": "rope" if turns else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // int(str(found["hidden_size"])),
        "mamba_n_groups": keys.integer("ssm.group_count", minimum=1),
        "mamba_d_state": keys.integer("ssm.state_size", minimum=1),
        "mamba_d_conv": keys.integer("ssm.conv_kernel", minimum=2),
        "mamba_conv_bias": has(stored, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(stored, "ssm_in.bias"),
    }


def _attention_heads(keys: Section, stored: Stored) -> Section:
    """The plain settings, with one number of key heads: that of the tensors, for the setting may be 0 everywhere."""
    plain = {key: keys.raw(key) for key in _PLAIN if keys.has(key)}
    heads = whole(keys, "attention.head_count", beside=_NO_KV)
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // max(heads, 1))
    rows = next((each.shape[0] for name, each in stored.items() if name.endswith("attn_k.weight")), head_dim)
    plain |= {"attention.head_count": heads, "attention.head_count_kv": rows // max(head_dim, 1)}
    if isinstance(plain.get("feed_forward_length"), list):
        del plain["feed_forward_length"]
    return Section(plain, keys.where)


_PLAIN = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.finetuned"),
)


def _nemotron_h(keys: Section, stored: Stored) -> Config:
    """Layers of one branch each, which the tensors tell. Attention does not rotate."""
    layers = layer_count(keys)
    found = sizes(_attention_heads(keys, stored), stored)
    eps = next((key for key in _EPSILONS if keys.has(key)), _EPSILONS[0])
    for key in _PLAIN:
        keys.has(key)
    named = {"linear_attention": "ssm_in.weight", "full_attention": "attn_q.weight", "moe": "ffn_gate_inp.weight"}
    by_kind = {kind: layers_with(stored, name, layers) for kind, name in named.items()}
    kinds = [next((kind for kind, has_it in by_kind.items() if has_it[layer]), "mlp") for layer in range(layers)]
    plain = next((i for i, kind in enumerate(kinds) if kind == "mlp"), None)
    up = None if plain is None else stored.get(f"blk.{plain}.ffn_up.weight")
    heads = keys.integer("ssm.time_step_rank", minimum=1)
    moe: Config = {}
    if "moe" in kinds:
        moe = {
            **taken_experts(keys, "n_routed_experts"),
            **routed(keys),
            "moe_intermediate_size": expert_size(keys, stored),
            "moe_shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", minimum=1),
        }
        require(keys, "expert_gating_func", SIGMOID)
        keys.has("expert_shared_count")
    return {
        "model_type": "nemotron_h",
        **{key: value for key, value in found.items() if key not in ("num_hidden_layers", "intermediate_size")},
        **({} if up is None else {"intermediate_size": up.shape[0]}),
        "layer_norm_epsilon": keys.number(eps, above=0),
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": keys.integer("ssm.inner_size", minimum=1) // heads,
        "n_groups": keys.integer("ssm.group_count", minimum=1),
        "ssm_state_size": keys.integer("ssm.state_size", minimum=1),
        "conv_kernel": keys.integer("ssm.conv_kernel", minimum=2),
        "use_conv_bias": has(stored, "ssm_conv1d.bias"),
        "use_bias": has(stored, "ssm_in.bias"),
        "mlp_bias": has(stored, "ffn_up.bias"),
        **moe,
    }


_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_ONE_NORM = {"mlp_norm": "attn_norm"}

RECURRENT: dict[str, Architecture] = {
    "qwen3next": Architecture(
        config=lambda keys, stored: _with_experts(keys, stored, "qwen3_next"),
        names={"mlp_norm": "post_attention_norm"},
        rows=_next_rows,
        adapt=_added_norms,
    ),
    "qwen35": Architecture(
        config=lambda keys, stored: _delta_rule(keys, stored, "qwen3_5_text"),
        names={"mlp_norm": "post_attention_norm"},
        rows=_delta_rows,
        adapt=_added_norms,
    ),
    "qwen35moe": Architecture(
        config=lambda keys, stored: _with_experts(keys, stored, "qwen3_5_moe_text"),
        names={"mlp_norm": "post_attention_norm"},
        rows=_delta_rows,
        adapt=_added_norms,
    ),
    "lfm2": Architecture(config=_lfm2, names={"norm": "token_embd_norm"}),
    "lfm2moe": Architecture(config=_lfm2_moe, names={"norm": "token_embd_norm"}),
    "granitehybrid": Architecture(config=_granite_hybrid, paired=True, adapt=biases),
    "nemotron_h": Architecture(config=_nemotron_h, names=_ONE_NORM),
    "nemotron_h_moe": Architecture(config=_nemotron_h, names=_ONE_NORM),
}
