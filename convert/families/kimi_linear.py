"""Kimi Linear: layers of Kimi Delta Attention between latent attention without positions, and the experts of a DeepSeek
V3 under names of its own."""

import dataclasses
from collections.abc import Collection, Mapping

from ingot.configs.mixers import LinearAttentionConfig
from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v3, glm4_moe
from ingot.convert.family import takes
from ingot.convert.hf_config import is_called, mixer_layers, require_values
from ingot.convert.hf_latent import read_latent
from ingot.convert.hf_moe import dense_layers, expert_rows, shared_rows
from ingot.convert.weights import Concat, OneOf, Row, Take
from ingot.errors import ConfigError

_USUAL = LatentConfig(q_rank=0, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = MoeConfig(experts=256, per_token=8, intermediate_size=1024, normalized=True, scale=2.446, dense_layers=(0,))
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "scoring_func": "moe_router_activation_func",
}
# What later models of this type have: key → the value that asks for nothing.
_OTHERS: Mapping[str, object] = {
    "attn_res_block_size": None,
    "latent_moe_use_norm": False,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
}
_OTHER_GATES: Mapping[str, object] = {"gate_lower_bound": None, "use_full_rank_gate": False}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a KimiLinearForCausalLM; defaults are those of transformers."""
    delta = section.section("linear_attn_config")
    for place, others in ((section, _OTHERS), (delta, _OTHER_GATES)):
        require_values(place, others)
    for key in ("rope_theta", "rope_scaling", "use_grouped_topk"):  # no layer rotates, and groups are counted
        section.has(key)
    usual = section.called({ours: theirs for ours, theirs in _NAMES.items() if is_called(section, ours, theirs)})
    model = read_latent(usual, _USUAL, positions=1048576, eps=1e-5, kv_heads=32)
    plain = dense_layers(usual, model.num_layers, usual=usual.integer("first_k_dense_replace", 1), agree=False)
    return dataclasses.replace(
        model,
        still_layers=tuple(range(model.num_layers)),
        moe=glm4_moe.read_sigmoid_experts(usual, model.num_layers, plain, usual=_EXPERTS),
        mixer=_read_delta(section, delta),
        mixer_layers=_delta_layers(section, delta, model.num_layers),
    )


def _read_delta(section: Section, delta: Section) -> LinearAttentionConfig:
    """What the nested object says counts more."""

    def size(inner: str, outer: str, usual: int, minimum: int) -> int:
        return delta.integer(inner, section.integer(outer, usual, minimum=minimum), minimum=minimum)

    heads, dim = size("num_heads", "linear_num_heads", 32, 1), size("head_dim", "linear_head_dim", 128, 1)
    return LinearAttentionConfig(
        key_heads=heads,
        heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_width=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 2),
        low_rank=dim,
    )


def _delta_layers(section: Section, delta: Section, layers: int) -> tuple[int, ...]:
    """layer_types, or two lists that count layers from 1, or every fourth layer but the first has attention."""
    whole, ours = delta.numbers("full_attn_layers"), delta.numbers("kda_layers")
    attention = [layer for layer in range(layers) if layer and layer % 4 == 0]
    if whole or ours:
        attention = [int(layer) - 1 for layer in whole]
        if sorted((*whole, *ours)) != list(range(1, layers + 1)):
            raise ConfigError(
                "kda_layers and full_attn_layers do not name each layer once",
                where=delta.place("kda_layers"),
                expected=f"with full_attn_layers each of 1 to {layers}, once",
                got=repr([*whole, *ours])[:200],
            )
    return mixer_layers(section, layers, "linear_attention", attention)


_ATTN, _BLOCKS = "model.layers.{i}.self_attn", ("model.layers.{i}.block_sparse_moe", "model.layers.{i}.mlp")
_DELTA = {
    "z_low/weight": "g_a_proj.weight",
    "z/weight": "g_b_proj.weight",
    "b/weight": "b_proj.weight",
    "dt_low/weight": "f_a_proj.weight",
    "dt/weight": "f_b_proj.weight",
    "dt/bias": "dt_bias",
    "a_log/weight": "A_log",
    "norm/weight": "o_norm.weight",
    "out/weight": "o_proj.weight",
}


def _three(name: str) -> Concat:
    return Concat(tuple(Take(f"{_ATTN}.{each}_{name}.weight") for each in "qkv"))


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="kimi_linear",
    models="Kimi-Linear 48B-A3B",
    read=read,
    rows=tuple(row for row in deepseek_v3.FAMILY.rows if "/moe/" not in row.name and "/mlp/" not in row.name)
    + expert_rows(*_BLOCKS, gate="w1", up="w3", down="w2", bias=("gate.e_score_correction_bias",))
    + shared_rows(*(f"{block}.shared_experts" for block in _BLOCKS))
    + tuple(
        Row(f"layers.{{i}}/mlp/{name}/{kind}", OneOf(tuple(Take(f"{block}.{name}_proj.{kind}") for block in _BLOCKS)))
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    )
    + takes({f"layers.{{i}}/linear/{ours}": f"{_ATTN}.{theirs}" for ours, theirs in _DELTA.items()})
    + (Row("layers.{i}/linear/qkv/weight", _three("proj")), Row("layers.{i}/linear/conv/weight", _three("conv1d"))),
    nullable=("q_lora_rank", "num_key_value_heads", "layer_types", "mlp_layer_types"),
    tiny={
        "model_type": "kimi_linear",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 84,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "linear_num_heads": 3,
        "linear_head_dim": 20,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 12,
        "num_experts_per_token": 3,
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 20,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
