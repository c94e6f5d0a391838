"""Youtu-LLM: latent attention as in DeepSeek V3, and a plain MLP in every layer."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import deepseek_v2, llama
from ingot.convert.hf_latent import LATENT_ROWS, read_latent

_USUAL = LatentConfig(q_rank=1536, kv_rank=512, key_dim=128, rope_dim=64, value_dim=128)
_KEPT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
_SIZES = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a YoutuForCausalLM; defaults are those of transformers."""
    model = read_latent(section, _USUAL, positions=131072, eps=1e-6, kv_heads=16)
    for key in ("embedding_initializer_range", "mlp_bias"):
        section.has(key)  # of the training; of a Llama's MLP, which this is not
    return dataclasses.replace(model, tied_embeddings=section.boolean("tie_word_embeddings", True))


FAMILY = dataclasses.replace(
    deepseek_v2.FAMILY,
    name="youtu",
    models="Youtu-LLM 2B",
    read=read,
    rows=(*(row for row in llama.FAMILY.rows if "/attn/" not in row.name), *LATENT_ROWS),
    nullable=("q_lora_rank",),
    tiny={
        **{key: deepseek_v2.FAMILY.tiny[key] for key in (*_KEPT, *_SIZES)},
        "model_type": "youtu",
        "num_key_value_heads": deepseek_v2.FAMILY.tiny["num_attention_heads"],
        "q_lora_rank": 24,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
