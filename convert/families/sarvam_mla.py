"""Sarvam 105B: a DeepSeek V3 of other sizes, whose makers call its scaling deepseek_yarn."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v3, glm4_moe
from ingot.convert.hf_config import is_called
from ingot.convert.hf_latent import read_latent

_USUAL = LatentConfig(q_rank=0, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = MoeConfig(experts=128, per_token=8, intermediate_size=2048, normalized=True, scale=2.5, dense_layers=(0,))
_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a DeepseekV3ForCausalLM of the type sarvam_mla; defaults are those of transformers."""
    section = section.called({ours: theirs for ours, theirs in _NAMES.items() if is_called(section, ours, theirs)})
    section.has("q_head_dim")  # follows from the others
    section.has("num_mtp_layers")
    model = read_latent(section, _USUAL, positions=4096, eps=1e-6)
    return dataclasses.replace(model, moe=glm4_moe.read_sigmoid_experts(section, model.num_layers, usual=_EXPERTS))


FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    name="sarvam_mla",
    models="Sarvam 105B",
    read=read,
    tiny={
        **deepseek_v3.FAMILY.tiny,
        "model_type": "sarvam_mla",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
)
