"""InternLM 1: a Llama with biases around attention."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an InternLMForCausalLM; defaults are those of the files' own code."""
    model = llama.read_llama(section, has_attention_bias=False)
    bias = section.boolean("bias", True)
    return dataclasses.replace(model, kv_heads=model.heads, qkv_bias=bias, attention_out_bias=bias)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="internlm",
    models="InternLM 7B and 20B",
    read=read,
    nullable=(),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key not in ("head_dim", "num_key_value_heads")},
        "model_type": "internlm",
        "bias": True,
    },
)
