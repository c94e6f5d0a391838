"""DeepSeek V3.2: a DeepSeek V3 that attends to chosen tokens where there are more than index_topk."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v3, glm4_moe
from ingot.convert.hf_latent import read_choice, read_latent
from ingot.convert.hf_moe import dense_layers

_USUAL = LatentConfig(q_rank=1536, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128)
EXPERTS = MoeConfig(experts=256, per_token=8, intermediate_size=2048, normalized=True, groups=8, group_top=4, scale=2.5)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a DeepseekV32ForCausalLM; defaults are those of transformers."""
    return with_choice(section, read_latent(section, _USUAL, positions=163840, eps=1e-6, kv_heads=128, interleave=True))


def with_choice(section: Section, model: ModelConfig, usual: MoeConfig = EXPERTS) -> ModelConfig:
    """The model with its experts, up to as many tokens as it chooses. usual: the family's default experts."""
    section.boolean("mlp_bias", False)  # without effect in this family
    first = section.integer("first_k_dense_replace", 3)  # which transformers writes beside mlp_layer_types
    plain = dense_layers(section, model.num_layers, usual=first, agree=False)
    moe = glm4_moe.read_sigmoid_experts(section, model.num_layers, plain, usual=usual)
    return read_choice(section, dataclasses.replace(model, moe=moe))


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="deepseek_v32",
    models="DeepSeek-V3.2, up to 2,048 tokens",
    read=read,
    choosers=".self_attn.indexer.",
    nullable=("layer_types", "index_topk_pattern"),
    tiny={
        **deepseek_v3.FAMILY.tiny,
        "model_type": "deepseek_v32",
        "max_position_embeddings": 256,
        "index_topk": 72,
        "index_head_dim": 16,
        "index_n_heads": 4,
    },
)
