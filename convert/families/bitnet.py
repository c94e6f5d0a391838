"""BitNet b1.58: a Llama with a norm before the last product of attention and of the MLP, which squares a ReLU."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a BitNetForCausalLM; defaults are those of transformers."""
    model = llama.read_llama(section, positions=2048, kv_heads=5, eps=1e-5, activation="relu2", theta=500000.0)
    if model.heads * model.head_dim != model.hidden_size:  # which the norm behind the heads is as wide as
        raise ConfigError(
            "head_dim times the number of heads is not the hidden size",
            where=section.place("head_dim"),
            expected=f"hidden_size / num_attention_heads: {model.hidden_size} / {model.heads}",
            got=str(model.head_dim),
        )
    return dataclasses.replace(model, inner_norms=True)


INNER_NORMS = takes(
    {
        "layers.{i}/attn/inner_norm/weight": "model.layers.{i}.self_attn.attn_sub_norm.weight",
        "layers.{i}/mlp/inner_norm/weight": "model.layers.{i}.mlp.ffn_sub_norm.weight",
    }
)

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="bitnet",
    models="BitNet b1.58 2B 4T",
    read=read,
    rows=llama.FAMILY.rows + INNER_NORMS,
    nullable=("num_key_value_heads",),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key != "head_dim"},
        "model_type": "bitnet",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    },
)
