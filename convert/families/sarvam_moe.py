"""Sarvam 30B: a GLM 4.5 whose heads rotate as a whole. Its own files hold queries, keys and values in one matrix."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import glm4_moe, llama
from ingot.convert.hf_config import is_called
from ingot.convert.weights import Expr, OneOf, Row, Take, rename

_EXPERTS = MoeConfig(experts=128, per_token=6, intermediate_size=1024, normalized=True, scale=2.5, dense_layers=(0,))
_NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
    "num_nextn_predict_layers": "num_mtp_layers",
}
# What the files of its makers call otherwise than transformers does.
_TENSORS = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "model.embed_tokens": "model.word_embeddings",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
_FUSED = "model.layers.{i}.attention.query_key_value"


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Glm4MoeForCausalLM of the type sarvam_moe; defaults are those of transformers."""
    section = section.called({ours: theirs for ours, theirs in _NAMES.items() if is_called(section, ours, theirs)})
    model = llama.read_llama(
        section, positions=131072, kv_heads=4, head_dim=64, theta=8e6, partial_rotary=1.0, has_attention_bias=False
    )
    section.has("num_nextn_predict_layers")  # how many layers the files hold for later tokens
    return dataclasses.replace(
        model,
        qkv_bias=section.boolean("attention_bias", False),
        qk_norm=QkNorm.HEAD if section.boolean("use_qk_norm", True) else None,
        moe=glm4_moe.read_sigmoid_experts(section, model.num_layers, usual=_EXPERTS),
        fused_qkv=names is None or any(name.endswith("attention.query_key_value.weight") for name in names),
    )


def _either(expr: Expr) -> Expr:
    for ours, theirs in _TENSORS.items():
        if (other := rename(expr, ours, theirs)) != expr:
            return OneOf((expr, other))
    return expr


FAMILY = dataclasses.replace(
    glm4_moe.FAMILY,
    name="sarvam_moe",
    models="Sarvam 30B",
    read=read,
    rows=tuple(Row(row.name, _either(row.expr)) for row in glm4_moe.FAMILY.rows)
    + tuple(Row(f"layers.{{i}}/attn/qkv/{kind}", Take(f"{_FUSED}.{kind}")) for kind in ("weight", "bias")),
    tiny={
        **glm4_moe.FAMILY.tiny,
        "model_type": "sarvam_moe",
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
