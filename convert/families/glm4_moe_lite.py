"""GLM 4.7 Flash: the attention and the experts of DeepSeek V3 in other sizes."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v3, glm4_moe
from ingot.convert.hf_latent import read_latent
from ingot.convert.hf_moe import dense_layers

_USUAL = LatentConfig(q_rank=768, kv_rank=512, key_dim=192, rope_dim=64, value_dim=256)
_EXPERTS = MoeConfig(experts=64, per_token=4, intermediate_size=1536, normalized=True, scale=1.8, dense_layers=(0,))


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Glm4MoeLiteForCausalLM; defaults are those of transformers."""
    model = read_latent(section, _USUAL, positions=202752, eps=1e-5, kv_heads=20)
    plain = dense_layers(section, model.num_layers, usual=1)
    return dataclasses.replace(
        model, moe=glm4_moe.read_sigmoid_experts(section, model.num_layers, plain, usual=_EXPERTS)
    )


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="glm4_moe_lite",
    models="GLM-4.7-Flash",
    read=read,
    nullable=("q_lora_rank",),
    tiny={
        **{
            key: value
            for key, value in deepseek_v3.FAMILY.tiny.items()
            if key not in ("rope_parameters", "first_k_dense_replace")
        },
        "model_type": "glm4_moe_lite",
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
)
