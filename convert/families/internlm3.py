"""InternLM 3: a Llama with defaults of its own, whose biases are all there or none."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import is_called
from ingot.errors import UnsupportedModelError

_NAMES = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an InternLM3ForCausalLM; defaults are those of transformers."""
    usual = section.called({ours: theirs for ours, theirs in _NAMES.items() if is_called(section, ours, theirs)})
    default = None if section.is_null("head_dim") else 128
    model = llama.read_llama(usual, positions=32768, kv_heads=2, head_dim=default, eps=1e-5)
    bias = usual.boolean("mlp_bias", False)
    if bias != model.qkv_bias:
        raise UnsupportedModelError(
            "qkv_bias differs from bias, which is not supported",
            where=usual.place("mlp_bias"),
            expected=str(model.qkv_bias).lower(),
            got=str(bias).lower(),
        )
    return dataclasses.replace(model, mlp_bias=bias)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="internlm3",
    models="InternLM 3 8B",
    read=read,
    tiny={**llama.FAMILY.tiny, "model_type": "internlm3", "head_dim": 12},
)
