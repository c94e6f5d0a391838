"""MiniMax M2 to M2.7: a Llama with experts scored by sigmoids, norms of all query and key heads, partial rotation."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, RouterScore
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3
from ingot.convert.hf_config import require_values
from ingot.convert.hf_moe import expert_rows, read_experts
from ingot.errors import UnsupportedModelError

# What files say that is so in every model of this family.
_OF_ALL: dict[str, object] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MiniMaxM2ForCausalLM; defaults are those of transformers."""
    require_values(section, _OF_ALL)
    if any(kind != 1 for kind in section.numbers("attn_type_list")):
        raise UnsupportedModelError(
            "layers of linear attention are not supported in this family",
            where=section.place("attn_type_list"),
            expected="a list of ones: 1 stands for attention",
        )
    for key in ("use_mtp", "mtp_transformer_layers", "num_mtp_modules"):  # of layers that no file holds
        section.has(key)
    head_dim = section.integer("head_dim", 128, minimum=1)
    part = section.integer("rotary_dim", head_dim, minimum=1) / head_dim
    model = llama.read_llama(
        section, positions=196608, kv_heads=8, head_dim=128, theta=5e6, partial_rotary=part, has_attention_bias=False
    )
    moe = read_experts(
        section,
        experts=256,
        per_token=8,
        intermediate_size=model.intermediate_size,
        normalized=True,
        known=tuple(_OF_ALL),
    )
    moe = dataclasses.replace(moe, score=RouterScore.SIGMOID, select_bias=True)
    return dataclasses.replace(model, qk_norm=QkNorm.WIDTH, moe=moe)


_EXPERTS = expert_rows(
    "model.layers.{i}.block_sparse_moe",
    "model.layers.{i}.mlp",  # as trained; as transformers 5 calls it
    gate="w1",
    up="w3",
    down="w2",
    bias=("e_score_correction_bias",),
)

FAMILY = dataclasses.replace(
    qwen3.FAMILY,
    name="minimax_m2",
    models="MiniMax-M2 to M2.7",
    read=read,
    rows=qwen3.FAMILY.rows + _EXPERTS,
    nullable=("attn_type_list",),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "minimax_m2",
        "intermediate_size": 20,
        "num_local_experts": 9,
        "num_experts_per_tok": 4,
        "rotary_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
