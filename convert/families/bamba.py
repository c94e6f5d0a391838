"""Bamba: Mamba 2 in most layers, attention in a few whose heads rotate by half, and an MLP in each."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import falcon_h1, llama
from ingot.convert.hf_config import mixer_layers, require_values
from ingot.convert.hf_mamba import read_mamba, require_silu
from ingot.errors import ConfigError

_ROTATING_PART = 0.5  # of a head, unless rope_parameters says otherwise: transformers ignores what stands beside it


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a BambaForCausalLM; defaults are those of transformers."""
    require_values(section, {"partial_rotary_factor": _ROTATING_PART})
    model = llama.read_llama(
        section, positions=262144, kv_heads=8, eps=1e-5, partial_rotary=_ROTATING_PART, intermediate=14336
    )
    require_silu(section, model.activation)
    for key in ("num_logits_to_keep", "z_loss_coefficient"):  # of prompts, and of the training
        section.has(key)
    mamba = read_mamba(section, section.integer("mamba_expand", 2, minimum=1) * model.hidden_size)
    return dataclasses.replace(
        model,
        mlp_bias=section.boolean("mlp_bias", False),
        mixer=dataclasses.replace(mamba, out_bias=mamba.bias, norm_groups=mamba.groups),
        mixer_layers=mixer_layers(section, model.num_layers, "linear_attention", _attention(section)),
    )


def _attention(section: Section) -> tuple[int, ...]:
    """Layers with attention."""
    listed = section.numbers("attn_layer_indices")
    if not all(isinstance(each, int) and each >= 0 for each in listed):
        raise ConfigError(
            "attn_layer_indices has a wrong value",
            where=section.place("attn_layer_indices"),
            expected="a list of layers",
            got=repr(list(listed))[:200],
        )
    return tuple(int(each) for each in listed)


FAMILY = dataclasses.replace(
    falcon_h1.FAMILY,
    name="bamba",
    models="Bamba 9B",
    read=read,
    nullable=("num_key_value_heads", "attn_layer_indices", "layer_types", "num_logits_to_keep"),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
)
