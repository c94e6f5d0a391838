"""Falcon H1: a Llama with Mamba 2 beside the attention of every layer, and factors in many places."""

import dataclasses
import math
from collections.abc import Collection

from ingot.configs.mixers import Mamba2Config
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_mamba import mamba_rows, read_mamba, require_silu
from ingot.convert.weights import Row, rename
from ingot.errors import ConfigError, UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a FalconH1ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=8192, kv_heads=8, eps=1e-5, intermediate=14336)
    require_silu(section, model.activation)
    gate, mlp = _factors(section, "mlp_multipliers", 2)
    return dataclasses.replace(
        model,
        mlp_bias=section.boolean("mlp_bias", False),
        embedding_scale=_factor(section, "embedding_multiplier"),
        logit_scale=_factor(section, "lm_head_multiplier"),
        attention_scale=model.attention_scale * _factor(section, "key_multiplier"),
        attention_in_scale=_factor(section, "attention_in_multiplier"),
        attention_out_scale=_factor(section, "attention_out_multiplier"),
        gate_scale=gate,
        mlp_scale=mlp,
        mixer=_read_mamba(section, model.hidden_size),
        mixer_layers=tuple(range(model.num_layers)),
        mixer_beside=True,
        mixer_scale=_factor(section, "ssm_out_multiplier"),
    )


def _read_mamba(section: Section, hidden: int) -> Mamba2Config:
    expanded = section.integer("mamba_expand", 2, minimum=1) * hidden
    inner = expanded if section.is_null("mamba_d_ssm") else section.integer("mamba_d_ssm", 1024, minimum=1)
    mamba = read_mamba(section, inner)
    gate_first = not section.boolean("mamba_norm_before_gate", True)
    normed = section.boolean("mamba_rms_norm", False)
    if normed and not gate_first:
        raise UnsupportedModelError(
            "mamba_norm_before_gate true is not supported",
            where=section.place("mamba_norm_before_gate"),
            expected="false, or mamba_rms_norm false",
        )
    return dataclasses.replace(
        mamba,
        out_bias=section.boolean("projectors_bias", False),
        norm_groups=mamba.groups if normed else 0,
        in_scale=_factor(section, "ssm_in_multiplier"),
        part_scales=_factors(section, "ssm_multipliers", 5),
    )


def _factor(section: Section, key: str) -> float:
    return section.number(key, 1.0, above=0)


def _factors(section: Section, key: str, count: int) -> tuple[float, ...]:
    """That many factors; ones where the key is absent or null."""
    values = section.numbers(key) or (1.0,) * count
    if len(values) != count or not all(0 < each < math.inf for each in values):
        raise ConfigError(
            f"{key} has a wrong value",
            where=section.place(key),
            expected=f"a list of {count} numbers above 0",
            got=repr(section.raw(key))[:200],
        )
    return tuple(float(each) for each in values)


_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
}


def _renamed(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    for ours, theirs in _NAMES.items():
        rows = tuple(dataclasses.replace(row, expr=rename(row.expr, ours, theirs)) for row in rows)
    return rows


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="falcon_h1",
    models="Falcon H1, 0.5B to 34B",
    read=read,
    rows=_renamed(llama.FAMILY.rows) + mamba_rows("model.layers.{i}.mamba"),
    nullable=("num_key_value_heads", "mamba_d_ssm", "mlp_multipliers", "ssm_multipliers"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
        "mlp_multipliers": [0.8, 0.7],
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 0.6],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
    },
)
