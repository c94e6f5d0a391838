"""DeepSeek MoE of 2024: a Llama with experts by softmax beside some that all tokens share."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, MoeConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v2, llama
from ingot.convert.hf_moe import read_experts

_OF_TRAINING = ("aux_loss_alpha", "seq_aux")
_KNOWN = ("n_shared_experts", "first_k_dense_replace")


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a DeepseekForCausalLM; defaults are those of its own code, transformers has none."""
    for key in _OF_TRAINING:
        section.has(key)
    model = llama.read_llama(section, intermediate=11008)
    return dataclasses.replace(model, moe=_experts(section, model.num_layers))


def _experts(section: Section, layers: int) -> MoeConfig | None:
    """None where every layer has a plain MLP."""
    first, every = section.integer("first_k_dense_replace", 0), section.integer("moe_layer_freq", 1, minimum=1)
    dense = tuple(layer for layer in range(layers) if layer < first or layer % every)
    inner, shared = section.integer("moe_intermediate_size", 1407, minimum=1), section.integer("n_shared_experts", 0)
    normalized = section.boolean("norm_topk_prob", False)
    if not section.has("n_routed_experts"):
        section.has("num_experts_per_tok")  # of none
        return None
    moe = read_experts(
        section,
        experts=section.integer("n_routed_experts", minimum=1),
        per_token=section.integer("num_experts_per_tok", minimum=1),
        intermediate_size=inner,
        normalized=normalized,
        dense_layers=dense,
        known=_KNOWN,
        count_key="n_routed_experts",
    )
    normalized = normalized and moe.per_token > 1  # one expert weighs its own share
    offset = 1e-20 if normalized else 0.0
    moe = dataclasses.replace(moe, normalized=normalized, sum_offset=offset, shared_size=inner * shared)
    return None if len(dense) == layers else moe


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="deepseek",
    models="DeepSeekMoE 16B",
    read=read,
    rows=(*llama.FAMILY.rows, *(row for row in deepseek_v2.FAMILY.rows if row.name.startswith("layers.{i}/moe/"))),
    nullable=("num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "deepseek",
        "num_hidden_layers": 3,
        "n_routed_experts": 9,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
    },
)
