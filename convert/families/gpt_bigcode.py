"""GPTBigCode (StarCoder, SantaCoder): a GPT-2 with matrices stored [out, in] and one head of keys and values."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.families import gpt2
from ingot.errors import UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GPTBigCodeForCausalLM; defaults are those of transformers."""
    if not section.boolean("multi_query", True):
        raise UnsupportedModelError(
            "multi_query false is not supported", where=section.place("multi_query"), expected="true", got="false"
        )
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        section.boolean(key, True)  # scores are always float32 here
    return dataclasses.replace(
        gpt2.read(section, None),
        family="gpt_bigcode",
        kv_heads=1,
        activation=read_activation(section, "activation_function", "gelu_pytorch_tanh"),
        linear_in_out=False,
        scale_by_inverse_layer=False,
    )


FAMILY = dataclasses.replace(
    gpt2.FAMILY,
    name="gpt_bigcode",
    models="StarCoder, SantaCoder",
    read=read,
    tiny={**gpt2.FAMILY.tiny, "model_type": "gpt_bigcode"},
)
