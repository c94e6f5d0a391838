"""MiniCPM 3: latent attention with a plain MLP, and factors on embeddings, branches and logits."""

import dataclasses
from collections.abc import Collection

from ingot.configs.model import LatentConfig, ModelConfig
from ingot.configs.read import Section
from ingot.convert.families import youtu
from ingot.convert.hf_latent import read_latent


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a MiniCPM3ForCausalLM; defaults are those of transformers."""
    hidden, heads = section.integer("hidden_size", minimum=1), section.integer("num_attention_heads", minimum=1)
    usual = LatentConfig(q_rank=768, kv_rank=256, key_dim=64, rope_dim=32, value_dim=max(1, hidden // heads))
    model = read_latent(section, usual, positions=32768, eps=1e-5, kv_heads=40, interleave=False)
    return dataclasses.replace(
        scaled(section, model, depth=1.4, base=256),
        attention_scale=model.head_dim**-0.5,
        embedding_scale=section.number("scale_emb", 12.0, above=0),
        mlp_bias=section.boolean("mlp_bias", False),
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


def scaled(section: Section, model: ModelConfig, *, depth: float | None, base: int | None) -> ModelConfig:
    """The model with the factors of branches and logits; null, or absent without a default: no factor."""
    branch, width = section.is_null("scale_depth"), section.is_null("dim_model_base")
    root = float(model.num_layers**0.5)
    depth = root if branch or depth is None else depth
    base = model.hidden_size if width or base is None else base
    return dataclasses.replace(
        model,
        residual_scale=section.number("scale_depth", depth, above=0) / root,
        logit_scale=section.integer("dim_model_base", base, minimum=1) / model.hidden_size,
    )


FAMILY = dataclasses.replace(
    youtu.FAMILY,
    name="minicpm3",
    models="MiniCPM3 4B",
    read=read,
    nullable=("q_lora_rank", "num_key_value_heads", "head_dim", "v_head_dim", "scale_depth", "dim_model_base"),
    tiny={**youtu.FAMILY.tiny, "model_type": "minicpm3", "scale_emb": 3, "dim_model_base": 24},
)
