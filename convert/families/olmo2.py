"""OLMo 2: a Llama with norms behind the branches instead of before them; q and k are normed over their whole width."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.families.qwen3 import QK_NORMS
from ingot.convert.family import takes


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of an Olmo2ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, eps=1e-5)
    return dataclasses.replace(model, qk_norm=QkNorm.WIDTH, pre_norms=False, post_norms=True)


_NORMS = {
    "layers.{i}/attn_post_norm/weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}/mlp_post_norm/weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_OTHERS = tuple(row for row in llama.FAMILY.rows if not row.name.endswith(("/attn_norm/weight", "/mlp_norm/weight")))

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="olmo2",
    models="OLMo 2",
    read=read,
    rows=_OTHERS + QK_NORMS + takes(_NORMS),
    nullable=("num_key_value_heads",),
    tiny={**llama.FAMILY.tiny, "model_type": "olmo2", "head_dim": 12, "eos_token_id": 2},
)
