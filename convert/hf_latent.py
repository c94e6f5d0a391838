"""How config.json and the files of Hugging Face spell multi-head latent attention."""

import dataclasses
import math

from ingot.configs.model import LatentConfig, ModelConfig, Norm, RopeConfig
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import takes
from ingot.convert.hf_config import read_kv_heads
from ingot.convert.hf_rope import interleaved, read_rope, rope_section
from ingot.convert.weights import OneOf, Row, Take
from ingot.errors import ConfigError, UnsupportedModelError

_MOST_ROW = 1024  # numbers that are kept of a token

# Keys of the training, and one that says what is so in every model.
_OF_TRAINING = ("aux_loss_alpha", "auto_map", "ep_size", "num_nextn_predict_layers", "num_mtp_layers", "seq_aux")

# How layers with sparse attention are called, and keys of what chooses their tokens.
_SPARSE = ("indexed_attention", "deepseek_sparse_attention")
_OF_CHOICE = (
    *("index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern"),
    *("indexer_rope_interleave", "indexer_types"),
)


def read_latent(
    section: Section,
    latent: LatentConfig,
    *,
    positions: int,
    eps: float,
    kv_heads: int | None = None,
    interleave: bool | None = None,
    partial: bool = False,
) -> ModelConfig:
    """A model with latent attention, its experts left out. The arguments are the family's defaults in transformers.

    kv_heads None: one per query head. interleave: whether pairs of dimensions that rotate lie side by side in every
    model; None: config.json may say not. partial: the rotation may say which part of a query it rotates
    """
    _read_training(section)
    hidden, heads = section.integer("hidden_size", minimum=1), section.integer("num_attention_heads", minimum=1)
    if (stated := read_kv_heads(section, heads, kv_heads)) != heads:
        raise ConfigError(
            "num_key_value_heads differs from num_attention_heads",
            where=section.place("num_key_value_heads"),
            expected=str(heads),
            got=str(stated),
        )
    latent = _read_sizes(section, latent)
    head_dim = latent.key_dim + latent.rope_dim
    for key in ("head_dim", "qk_head_dim"):  # which follow from the others, whatever they say
        section.integer(key, head_dim)
    most = section.integer("max_position_embeddings", positions, minimum=1)
    rope = _read_partial(section, latent, most) if partial else read_rope(section, latent.rope_dim, most)
    rotates_pairs = section.boolean("rope_interleave", True) if interleave is None else interleave
    bias = section.boolean("attention_bias", False)
    return ModelConfig(
        family=section.text("model_type"),
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("intermediate_size", minimum=1),
        num_layers=section.integer("num_hidden_layers", minimum=1),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        max_positions=most,
        norm=Norm.RMS,
        norm_eps=section.number("rms_norm_eps", eps, above=0),
        activation=read_activation(section, "hidden_act", "silu"),
        gated_mlp=True,
        rope=interleaved(rope) if rotates_pairs else rope,
        attention_scale=head_dim**-0.5 * _score_factor(section),
        qkv_bias=bias,
        attention_out_bias=bias,
        tied_embeddings=section.boolean("tie_word_embeddings", False),
        latent=latent,
    )


def _read_sizes(section: Section, latent: LatentConfig) -> LatentConfig:
    """latent: the family's defaults."""
    q_rank = 0 if section.is_null("q_lora_rank") else latent.q_rank
    if section.has("q_lora_rank"):
        q_rank = section.integer("q_lora_rank", minimum=1)
    latent = LatentConfig(
        q_rank=q_rank,
        kv_rank=_fours(section, "kv_lora_rank", latent.kv_rank),
        key_dim=section.integer("qk_nope_head_dim", latent.key_dim, minimum=1),
        rope_dim=_fours(section, "qk_rope_head_dim", latent.rope_dim),
        value_dim=section.integer("v_head_dim", latent.value_dim, minimum=1),
    )
    if latent.kv_rank + latent.rope_dim > _MOST_ROW:
        raise ConfigError(
            "kv_lora_rank is too large",
            where=section.place("kv_lora_rank"),
            expected=f"at most {_MOST_ROW} together with qk_rope_head_dim",
            got=f"{latent.kv_rank} + {latent.rope_dim}",
        )
    return latent


def _read_partial(section: Section, latent: LatentConfig, most: int) -> RopeConfig:
    """The rotation, whose part of a query must be what the latent has for it."""
    head_dim = latent.key_dim + latent.rope_dim
    rope = read_rope(section, head_dim, most, partial=latent.rope_dim / head_dim)
    if rope.rotary_dim != latent.rope_dim:
        raise ConfigError(
            "partial_rotary_factor does not rotate the qk_rope_head_dim dimensions",
            where=rope_section(section).place("partial_rotary_factor"),
            expected=f"{latent.rope_dim} of {head_dim} dimensions",
            got=str(rope.rotary_dim),
        )
    return rope


def _read_training(section: Section) -> None:
    """Keys without effect, and one that must say what is so in every model."""
    for key in _OF_TRAINING:
        section.has(key)
    if section.has("moe_layer_freq") and section.raw("moe_layer_freq") != 1:
        raise UnsupportedModelError(
            "moe_layer_freq has a value that is not supported", where=section.place("moe_layer_freq"), expected="1"
        )


def _fours(section: Section, key: str, default: int) -> int:
    """A size that rows of the cache are made of."""
    size = section.integer(key, default, minimum=4)
    if size % 4:
        raise UnsupportedModelError(f"{key} is not a multiple of 4", where=section.place(key), got=str(size))
    return size


def _score_factor(section: Section) -> float:
    """What stretched rotations multiply the scores with: they have their share of it in cosines and sines too."""
    rope = rope_section(section)
    if rope.text("rope_type", rope.text("type", "default")) == "default":
        return 1.0
    weight = rope.number("mscale_all_dim", 0.0)
    factor = rope.number("factor", 1.0, above=0)
    share = 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
    return share * share  # infinite where it is too large: a power would raise


def read_choice(section: Section, model: ModelConfig) -> ModelConfig:
    """The model up to as many tokens as its sparse attention chooses: there it attends to all of them."""
    kinds = section.raw("layer_types") if section.has("layer_types") else []
    if not isinstance(kinds, list) or any(kind not in _SPARSE for kind in kinds):
        raise UnsupportedModelError(
            "layer_types names other layers than this family has",
            where=section.place("layer_types"),
            expected=f"{_SPARSE[0]} for each layer",
            got=repr(kinds)[:200],
        )
    if not section.boolean("rope_interleave", True):
        raise UnsupportedModelError(
            "rope_interleave false is not supported in this family",
            where=section.place("rope_interleave"),
            expected="true",
        )
    if model.latent is not None and not model.latent.q_rank:
        raise ConfigError(
            "q_lora_rank is null, and sparse attention needs it",
            where=section.place("q_lora_rank"),
            expected="at least 1",
            got="null",
        )
    for key in _OF_CHOICE:
        section.has(key)
    section.integer("index_n_heads", 64, minimum=1)
    section.integer("index_head_dim", 128, minimum=model.latent.rope_dim if model.latent else 1)
    most = section.integer("index_topk", 2048, minimum=1)
    assert model.rope is not None, "read_latent reads a rotation"
    if (model.rope.positions or model.max_positions) <= most:
        return model
    rope = dataclasses.replace(model.rope, positions=most)
    return dataclasses.replace(model, rope=rope, max_positions=most, sparse_beyond=most)


_ATTN = "model.layers.{i}.self_attn"

LATENT_ROWS = (
    Row("layers.{i}/attn/q/weight", OneOf((Take(f"{_ATTN}.q_b_proj.weight"), Take(f"{_ATTN}.q_proj.weight")))),
    *takes(
        {
            "layers.{i}/attn/q_a/weight": f"{_ATTN}.q_a_proj.weight",
            "layers.{i}/attn/q_a/bias": f"{_ATTN}.q_a_proj.bias",
            "layers.{i}/attn/q_a_norm/weight": f"{_ATTN}.q_a_layernorm.weight",
            "layers.{i}/attn/latent/weight": f"{_ATTN}.kv_a_proj_with_mqa.weight",
            "layers.{i}/attn/latent/bias": f"{_ATTN}.kv_a_proj_with_mqa.bias",
            "layers.{i}/attn/latent_norm/weight": f"{_ATTN}.kv_a_layernorm.weight",
            "layers.{i}/attn/kv/weight": f"{_ATTN}.kv_b_proj.weight",
            "layers.{i}/attn/out/weight": f"{_ATTN}.o_proj.weight",
            "layers.{i}/attn/out/bias": f"{_ATTN}.o_proj.bias",
        }
    ),
)
