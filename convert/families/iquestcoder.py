"""IQuest-Coder: a Llama with defaults of its own."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import require_values


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an IQuestCoderForCausalLM; defaults are those of transformers."""
    require_values(section, {"clip_qkv": None, "use_sliding_window": False})
    default = None if section.is_null("head_dim") else 128
    model = llama.read_llama(section, positions=131072, kv_heads=8, head_dim=default, eps=1e-5)
    return dataclasses.replace(model, mlp_bias=section.boolean("mlp_bias", False))


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="iquestcoder",
    models="IQuest-Coder V1 40B",
    read=read,
    nullable=("head_dim", "num_key_value_heads"),
    tiny={**llama.FAMILY.tiny, "model_type": "iquestcoder", "bos_token_id": 1, "eos_token_id": 2},
)
