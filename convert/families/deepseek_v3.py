"""DeepSeek V3, V3.1 and R1: latent attention, and experts by sigmoids in groups beside one that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v2, glm4_moe
from ingot.convert.hf_latent import read_latent
from ingot.convert.hf_moe import select_bias_row

_USUAL = LatentConfig(q_rank=1536, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = MoeConfig(
    experts=256,
    per_token=8,
    intermediate_size=2048,
    normalized=True,
    groups=8,
    group_top=4,
    scale=2.5,
    dense_layers=(0, 1, 2),
)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a DeepseekV3ForCausalLM; defaults are those of transformers."""
    model = read_latent(section, _USUAL, positions=4096, eps=1e-6, kv_heads=128)
    return dataclasses.replace(model, moe=glm4_moe.read_sigmoid_experts(section, model.num_layers, usual=_EXPERTS))


FAMILY = dataclasses.replace(
    deepseek_v2.FAMILY,
    name="deepseek_v3",
    models="DeepSeek-V3, V3.1, R1",
    read=read,
    rows=(*deepseek_v2.FAMILY.rows, select_bias_row("model.layers.{i}.mlp.gate.e_score_correction_bias")),
    drafts="model.layers.{n}.",
    nullable=("q_lora_rank", "num_key_value_heads"),
    tiny={
        **deepseek_v2.FAMILY.tiny,
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
)
