"""Qwen 3.5, 3.6 and 3.8: three layers of the gated delta rule to one of attention, whose output has a gate."""

import dataclasses
from collections.abc import Collection

from ingot.configs.mixers import LinearAttentionConfig
from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama, qwen3
from ingot.convert.family import takes
from ingot.convert.hf_config import mixer_layers
from ingot.convert.hf_rope import rope_section
from ingot.convert.weights import Regroup, Row, Split, Take
from ingot.errors import ConfigError, UnsupportedModelError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Qwen3_5ForCausalLM; defaults are those of transformers."""
    return read_hybrid(
        section, llama.read_llama(section, positions=32768, kv_heads=4, head_dim=256, partial_rotary=0.25)
    )


def read_hybrid(section: Section, model: ModelConfig) -> ModelConfig:
    """What layers of the delta rule and gated attention add to a Llama."""
    for key in ("mrope_section", "mrope_interleaved"):  # the three positions of a text are equal
        rope_section(section).has(key)
    section.has("mamba_ssm_dtype")  # states are always float32
    if not section.boolean("attn_output_gate", True):
        raise UnsupportedModelError(
            "attn_output_gate false is not supported", where=section.place("attn_output_gate"), expected="true"
        )
    every = section.integer("full_attention_interval", 4, minimum=1)
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        norm_offset=1.0,
        output_gate=True,
        mixer=read_delta_rule(section),
        mixer_layers=mixer_layers(
            section, model.num_layers, "linear_attention", range(every - 1, model.num_layers, every)
        ),
    )


def read_delta_rule(section: Section) -> LinearAttentionConfig:
    """The linear_ keys; each head of the keys serves as many heads of the values."""
    mixer = LinearAttentionConfig(
        key_heads=section.integer("linear_num_key_heads", 16, minimum=1),
        heads=section.integer("linear_num_value_heads", 32, minimum=1),
        key_dim=section.integer("linear_key_head_dim", 128, minimum=1),
        value_dim=section.integer("linear_value_head_dim", 128, minimum=1),
        conv_width=section.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
    if mixer.heads % mixer.key_heads:
        raise ConfigError(
            "linear_num_value_heads is not a multiple of linear_num_key_heads",
            where=section.place("linear_num_value_heads"),
            expected=f"a multiple of linear_num_key_heads ({mixer.key_heads})",
            got=str(mixer.heads),
        )
    return mixer


_LAYER = "model.layers.{i}"
_LINEAR = {
    "qkv/weight": "in_proj_qkv.weight",
    "z/weight": "in_proj_z.weight",
    "b/weight": "in_proj_b.weight",
    "dt/weight": "in_proj_a.weight",
    "dt/bias": "dt_bias",
    "a_log/weight": "A_log",
    "conv/weight": "conv1d.weight",
    "norm/weight": "norm.weight",
    "out/weight": "out_proj.weight",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen3_5_text",
    models="the text model of Qwen 3.5, 3.6 and 3.8, dense",
    read=read,
    rows=tuple(row for row in llama.FAMILY.rows if "/attn/q/" not in row.name)
    + qwen3.QK_NORMS
    + takes({f"layers.{{i}}/linear/{ours}": f"{_LAYER}.linear_attn.{theirs}" for ours, theirs in _LINEAR.items()})
    + tuple(
        # of each head its query, then its gate
        Row(f"layers.{{i}}/attn/{name}/{kind}", Split(Regroup(Take(f"{_LAYER}.self_attn.q_proj.{kind}"), 2), 2, index))
        for index, name in enumerate(("q", "gate"))
        for kind in ("weight", "bias")
    ),
    drafts="mtp.",
    nullable=("layer_types",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4,
    },
)
