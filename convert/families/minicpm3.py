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
        scaled(section, model, embeddings=12.0, depth=1.4, base=256),
        attention_scale=model.head_dim**-0.5,
        mlp_bias=section.boolean("mlp_bias", False),
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


def scaled(section: Section, model: ModelConfig, *, embeddings: float, depth: float, base: int) -> ModelConfig:
    """The model with the factors of embeddings, branches and logits. The arguments are the family's defaults of
    scale_emb, scale_depth and dim_model_base; a null of the last two means no factor."""
    root = float(model.num_layers**0.5)
    depth = root if section.is_null("scale_depth") else depth
    base = model.hidden_size if section.is_null("dim_model_base") else base
    return dataclasses.replace(
        model,
        embedding_scale=section.number("scale_emb", embeddings, above=0),
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
