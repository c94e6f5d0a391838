"""Mixtral: a Mistral whose MLPs are mixtures of experts."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.hf_config import read_window
from ingot.convert.hf_moe import expert_rows, read_experts


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MixtralForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=131072, kv_heads=8, eps=1e-5, theta=1e6, has_attention_bias=False)
    window = read_window(section)
    moe = read_experts(section, experts=8, per_token=2, intermediate_size=model.intermediate_size, normalized=True)
    return dataclasses.replace(model, moe=moe, windows=(window,) * model.num_layers if window else ())


_EXPERTS = expert_rows(
    "model.layers.{i}.block_sparse_moe",
    "model.layers.{i}.mlp",  # as trained; as transformers 5 calls it
    gate="w1",
    up="w3",
    down="w2",
)

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mixtral",
    models="Mixtral 8x7B and 8x22B",
    read=read,
    rows=llama.FAMILY.rows + _EXPERTS,
    nullable=("head_dim", "sliding_window"),
    tiny={
        **llama.FAMILY.tiny,
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 37,
        "head_dim": 24,
        "sliding_window": 16,
    },
)
