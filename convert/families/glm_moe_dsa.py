"""GLM 5: a DeepSeek V3.2 in other sizes, of which some layers share what they choose."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v32
from ingot.convert.hf_latent import read_latent

_USUAL = LatentConfig(q_rank=2048, kv_rank=512, key_dim=192, rope_dim=64, value_dim=256)
_EXPERTS = dataclasses.replace(deepseek_v32.EXPERTS, groups=1, group_top=1)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GlmMoeDsaForCausalLM; defaults are those of transformers."""
    model = read_latent(section, _USUAL, positions=202752, eps=1e-5, kv_heads=64, interleave=True)
    return deepseek_v32.with_choice(section, model, _EXPERTS)


FAMILY = dataclasses.replace(
    deepseek_v32.FAMILY,
    name="glm_moe_dsa",
    models="GLM-5 to 5.2, up to 2,048 tokens",
    read=read,
    tiny={
        **{
            key: value
            for key, value in deepseek_v32.FAMILY.tiny.items()
            if key not in ("rope_parameters", "first_k_dense_replace")
        },
        "model_type": "glm_moe_dsa",
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": ["dense", "sparse", "dense"],
        "indexer_types": ["full", "shared", "full"],
    },
)
