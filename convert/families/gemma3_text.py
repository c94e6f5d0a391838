"""Gemma 3, its text model: a Gemma 2 with q and k norms and a rotation of its own in the layers with a window."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm, RopeConfig
from ingot.configs.read import Section
from ingot.convert.families import gemma2
from ingot.convert.families.qwen3 import QK_NORMS
from ingot.convert.hf_rope import read_frequencies, rope_section


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Gemma3ForCausalLM; defaults are those of transformers, which has no caps of scores here."""
    model = gemma2.read_gemma(section, every=section.integer("sliding_window_pattern", 6, minimum=1), positions=131072)
    rope, local_rope = _read_ropes(section, model)
    return dataclasses.replace(
        model, qk_norm=QkNorm.HEAD, rope=rope, local_rope=local_rope if any(model.windows) else None,
        logit_cap=gemma2.read_cap(section, "final_logit_softcapping", 0.0),
    )  # fmt: skip


def _read_ropes(section: Section, model: ModelConfig) -> tuple[RopeConfig, RopeConfig]:
    """(of the layers that see all, of those with a window). transformers 5 nests an object for each kind of layer."""
    rope = rope_section(section)
    theta = section.number("rope_theta", 1e6, above=0)
    local_theta = section.number("rope_local_base_freq", 1e4, above=0)
    if not (rope.has("full_attention") or rope.has("sliding_attention")):
        whole = read_frequencies(
            rope, section, rope.number("rope_theta", theta, above=0), model.head_dim, model.max_positions
        )
        return whole, RopeConfig(theta=local_theta, rotary_dim=model.head_dim)
    kinds = [(rope.section("full_attention"), theta), (rope.section("sliding_attention"), local_theta)]
    whole, local = (
        read_frequencies(kind, section, kind.number("rope_theta", usual, above=0), model.head_dim, model.max_positions)
        for kind, usual in kinds
    )
    return whole, local


FAMILY = dataclasses.replace(
    gemma2.FAMILY, name="gemma3_text", read=read, rows=gemma2.FAMILY.rows + QK_NORMS,
    tiny={
        **gemma2.FAMILY.tiny, "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
)  # fmt: skip
