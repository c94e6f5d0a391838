"""StableLM 3B and 2 1.6B: a Llama with layer norms; a quarter of each head rotates."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.families.phi import refuse_layer_norms
from ingot.convert.family import takes


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a StableLmForCausalLM; defaults are those of transformers."""
    refuse_layer_norms(section)
    model = llama.read_llama(
        section,
        positions=4096,
        kv_heads=32,
        partial_rotary=0.25,
        eps_key="layer_norm_eps",
        eps=1e-5,
        has_attention_bias=False,
    )
    parallel = section.boolean("use_parallel_residual", False)
    return dataclasses.replace(
        model,
        norm=Norm.LAYER,
        qkv_bias=section.boolean("use_qkv_bias", False),
        parallel_branches=parallel,
        shared_norm=parallel,
    )


_BIASES = {
    "layers.{i}/attn_norm/bias": "model.layers.{i}.input_layernorm.bias",
    "layers.{i}/mlp_norm/bias": "model.layers.{i}.post_attention_layernorm.bias",
    "norm/bias": "model.norm.bias",
}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="stablelm",
    models="StableLM 3B, StableLM 2",
    read=read,
    rows=llama.FAMILY.rows + takes(_BIASES),
    nullable=(),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "stablelm",
        "hidden_size": 64,
        "use_qkv_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
