"""Phi 3, 3.5 and 4: a Llama with one weight for q, k, v and one for gate and up; part of a head may rotate."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes
from ingot.convert.hf_config import read_window


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Phi3ForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(
        section,
        positions=4096,
        eps=1e-5,
        partial_rotary=1.0,
        has_attention_bias=False,
        rope_kinds=("default", "longrope", "su"),
    )
    window = read_window(section)
    return dataclasses.replace(
        model, fused_qkv=True, fused_gate_up=True, windows=(window,) * model.num_layers if window else ()
    )


_FUSED = {
    "layers.{i}/attn/qkv/weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "layers.{i}/mlp/gate_up/weight": "model.layers.{i}.mlp.gate_up_proj.weight",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="phi3",
    models="Phi-3, Phi-3.5-mini, Phi-4",
    read=read,
    rows=llama.FAMILY.rows + takes(_FUSED),
    nullable=("num_key_value_heads", "sliding_window"),
    tiny={
        "model_type": "phi3",
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 84,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "sliding_window": 24,
        "original_max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
)
