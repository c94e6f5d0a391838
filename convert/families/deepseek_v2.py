"""DeepSeek V2 and V2 Lite: latent attention, and experts by softmax beside some that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_latent import LATENT_ROWS, read_latent
from ingot.convert.hf_moe import expert_rows, read_experts, read_groups, shared_rows
from ingot.errors import UnsupportedModelError

_KNOWN = ("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor", "topk_method")
_USUAL = LatentConfig(q_rank=1536, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a DeepseekV2ForCausalLM; defaults are those of transformers."""
    model = read_latent(section, _USUAL, positions=2048, eps=1e-6, interleave=True)
    bias = section.boolean("mlp_bias", False)  # of the plain and the shared ones
    return dataclasses.replace(model, mlp_bias=bias, moe=_experts(section, model.num_layers))


def _experts(section: Section, layers: int) -> MoeConfig | None:
    """None where every layer has a plain MLP."""
    method = section.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"topk_method {method!r} is not supported",
            where=section.place("topk_method"),
            expected="greedy, group_limited_greedy",
            got=method,
        )
    section.has("norm_topk_prob")  # without effect in this family
    inner = section.integer("moe_intermediate_size", 1407, minimum=1)
    dense = min(section.integer("first_k_dense_replace", 0), layers)
    moe = read_experts(
        section,
        experts=64,
        per_token=section.integer("num_experts_per_tok", minimum=1),
        intermediate_size=inner,
        normalized=False,
        dense_layers=tuple(range(dense)),
        known=_KNOWN,
        count_key="n_routed_experts",
    )
    groups, group_top = 1, 1
    if method == "group_limited_greedy":
        groups, group_top = read_groups(section, moe.experts, moe.per_token, best=1)
    for key in ("n_group", "topk_group"):  # else without effect
        section.has(key)
    return (
        None
        if dense == layers
        else dataclasses.replace(
            moe,
            groups=groups,
            group_top=group_top,
            group_best=1,
            scale=section.number("routed_scaling_factor", 1.0, above=0),
            shared_size=inner * section.integer("n_shared_experts", 2, minimum=1),
        )
    )


_BLOCK = "model.layers.{i}.mlp"
_MINE = {row.name for row in LATENT_ROWS}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="deepseek_v2",
    models="DeepSeek-V2, V2-Lite and V2.5",
    read=read,
    rows=(
        *(row for row in llama.FAMILY.rows if row.name not in _MINE),
        *LATENT_ROWS,
        *expert_rows(_BLOCK, gate="gate_proj", up="up_proj", down="down_proj"),
        *shared_rows(f"{_BLOCK}.shared_experts"),
    ),
    nullable=("q_lora_rank", "n_group", "topk_group", "num_key_value_heads", "head_dim"),
    tiny={
        "model_type": "deepseek_v2",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 84,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "q_lora_rank": None,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "first_k_dense_replace": 1,
        "n_routed_experts": 9,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
    },
)
