"""MiMo 7B: a Qwen 2 whose files also hold layers that draft tokens."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import qwen2
from ingot.convert.hf_config import require_values


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MiMoForCausalLM, whose code is Qwen 2's."""
    require_values(section, {"attention_bias": True, "use_mrope": False})
    section.has("num_nextn_predict_layers")  # how many layers the files hold for later tokens
    return qwen2.read(section, names)


FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    name="mimo",
    models="MiMo 7B",
    read=read,
    drafts="model.mtp_layers.",
    tiny={**qwen2.FAMILY.tiny, "model_type": "mimo", "num_nextn_predict_layers": 1},
)
