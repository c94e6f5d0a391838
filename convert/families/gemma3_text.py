"""Gemma 3, its text model: a Gemma 2 with q and k norms and a rotation of its own in the layers with a window."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, RopeConfig
from ingot.configs.read import Section
from ingot.convert.families import gemma2
from ingot.convert.families.qwen3 import QK_NORMS
from ingot.convert.hf_rope import read_beside, read_frequencies, require_whole_heads, rope_section
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Gemma3ForCausalLM; defaults are those of transformers, which has no caps of scores here."""
    model = gemma2.read_gemma(section, every=section.integer("sliding_window_pattern", 6, minimum=1), positions=131072)
    rope, local_rope = read_ropes(section, model, theta=1e6, local_theta=1e4, local_key="rope_local_base_freq")
    return dataclasses.replace(
        model,
        qk_norm=QkNorm.HEAD,
        rope=rope,
        local_rope=local_rope if any(model.windows) else None,
        logit_cap=gemma2.read_cap(section, "final_logit_softcapping", 0.0),
    )


def read_ropes(
    section: Section, model: ModelConfig, *, theta: float, local_theta: float, local_key: str | None
) -> tuple[RopeConfig, RopeConfig]:
    """(of the layers that see all, of those with a window). theta, local_theta: the family's defaults; local_key: says
    local_theta beside the objects, None: nothing does.

    transformers 4 has scaling for the first alone, transformers 5 an object for each kind of layer, of which it reads
    everything but `truncate`, which stands beside them.
    """
    rope = rope_section(section)
    none = Section({}, section.where)
    if section.has("rope_parameters"):
        whole, local, flags = rope.section("full_attention"), rope.section("sliding_attention"), rope
        _require_kinds(rope)
    else:
        whole, local, flags = rope, none, none
        if rope.has("type") and not rope.has("rope_type"):
            raise ConfigError(
                "rope_scaling has the older key type, which transformers ignores for this model",
                where=rope.place("type"),
                expected="rope_type",
                got="type",
            )
    require_whole_heads(whole)
    require_whole_heads(local)
    return (
        read_frequencies(
            whole,
            section,
            read_beside(whole, "rope_theta", section, "rope_theta", theta),
            model.head_dim,
            model.max_positions,
            flags=flags,
        ),
        read_frequencies(
            local,
            section,
            read_beside(local, "rope_theta", section if local_key else none, local_key or "rope_theta", local_theta),
            model.head_dim,
            model.max_positions,
            flags=flags,
        ),
    )


def _require_kinds(rope: Section) -> None:
    """transformers takes no notice of a rotation that is not given for a kind of layers."""
    for key in ("rope_type", "type", "rope_theta", "factor"):
        if rope.has(key):
            raise ConfigError(
                "rope_parameters lacks an object for each kind of layer",
                where=rope.place(key),
                expected="objects full_attention and sliding_attention",
                got=repr(rope.raw(key)),
            )


FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    name="gemma3_text",
    models="Gemma 3 270M and 1B",
    read=read,
    rows=gemma2.FAMILY.rows + QK_NORMS,
    layer_ropes=True,
    tiny={
        **gemma2.FAMILY.tiny,
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)
