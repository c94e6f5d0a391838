"""Falcon 7B, 11B, 40B and 180B: layer norms, parallel branches, q, k, v stored by groups of heads. RW: ALiBi."""

from collections.abc import Collection

from ingot.configs.model import AlibiConfig, ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.alibi import bf16_slopes
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim
from ingot.convert.hf_rope import read_rope
from ingot.convert.weights import Drop, KeyGroups, OneOf, Row, Take
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a FalconForCausalLM; defaults are those of transformers."""
    hidden = section.integer("hidden_size", minimum=1)
    heads = section.integer("num_attention_heads", minimum=1)
    head_dim = read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    max_positions = section.integer("max_position_embeddings", 2048, minimum=1)
    parallel, bias = section.boolean("parallel_attn", True), section.boolean("bias", False)
    alibi = section.boolean("alibi", False)
    two_norms = _has_two_norms(section, parallel=parallel)
    inner = 4 * hidden if section.is_null("ffn_hidden_size") else 0
    return ModelConfig(
        family="falcon",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=inner or section.integer("ffn_hidden_size", 4 * hidden, minimum=1),
        num_layers=section.integer("num_hidden_layers", minimum=1),
        heads=heads,
        kv_heads=_kv_heads(section, heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm=Norm.LAYER,
        norm_eps=section.number("layer_norm_epsilon", 1e-5, above=0),
        activation=read_activation(section, "activation", "gelu"),
        gated_mlp=False,
        rope=None if alibi else read_rope(section, head_dim, max_positions),
        alibi=AlibiConfig(slopes=bf16_slopes(heads), bf16=True) if alibi else None,
        parallel_branches=parallel,
        shared_norm=parallel and not two_norms,
        attention_scale=head_dim**-0.5,
        fused_qkv=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


def _kv_heads(section: Section, heads: int) -> int:
    """As many as config.json says where layers are new; in older ones there is one, or one for each query head."""
    given = heads if section.is_null("num_kv_heads") else section.integer("num_kv_heads", heads, minimum=1)
    one = section.boolean("multi_query", True)
    if section.boolean("new_decoder_architecture", False):
        return given
    if not one and given != heads:
        raise ConfigError(
            "num_kv_heads differs from num_attention_heads",
            where=section.place("num_kv_heads"),
            expected=f"{heads}, as num_attention_heads, or new_decoder_architecture true",
            got=str(given),
        )
    return 1 if one else heads


def _has_two_norms(section: Section, *, parallel: bool) -> bool:
    """Whether attention and MLP read norms of their own, though both read what the layer was given."""
    new = section.boolean("new_decoder_architecture", False)
    absent = section.is_null("num_ln_in_parallel_attn") or not section.has("num_ln_in_parallel_attn")
    count = (2 if new else 1) if absent else section.integer("num_ln_in_parallel_attn", minimum=1)
    if count > (2 if new else 1) or (new and not parallel):
        raise ConfigError(
            "the number of norms does not fit the kind of layer",
            where=section.place("num_ln_in_parallel_attn" if parallel else "parallel_attn"),
            expected="1, or 2 with new_decoder_architecture, which has parallel_attn true",
            got=f"{count}, new_decoder_architecture {str(new).lower()}, parallel_attn {str(parallel).lower()}",
        )
    return count == 2


_LAYER = "transformer.h.{i}"
_KINDS = ("weight", "bias")
_NORMS = {"attn_norm": ("input_layernorm", "ln_attn"), "mlp_norm": ("post_attention_layernorm", "ln_mlp")}

FAMILY = Family(
    name="falcon",
    models="Falcon 7B, 11B, 40B and 180B, Falcon RW 1B and 7B",
    read=read,
    rows=takes(
        {
            "embed/weight": "transformer.word_embeddings.weight",
            **weights_and_biases(
                {
                    "layers.{i}/attn/out": f"{_LAYER}.self_attention.dense",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.dense_h_to_4h",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.dense_4h_to_h",
                    "norm": "transformer.ln_f",
                }
            ),
            "lm_head/weight": "lm_head.weight",
        }
    )
    + tuple(
        Row(f"layers.{{i}}/{ours}/{kind}", OneOf(tuple(Take(f"{_LAYER}.{name}.{kind}") for name in theirs)))
        for ours, theirs in _NORMS.items()
        for kind in _KINDS
    )
    + tuple(
        Row(
            f"layers.{{i}}/attn/qkv/{kind}",
            KeyGroups(
                Take(f"{_LAYER}.self_attention.query_key_value.{kind}"), ("queries", "kv_head", "kv_head"), (0, 1, 2)
            ),
        )
        for kind in _KINDS
    ),
    drops=(Drop(f"{_LAYER}.self_attention.rotary_emb.inv_freq"),),  # old files
    nullable=("num_kv_heads", "num_ln_in_parallel_attn", "ffn_hidden_size"),
    aliases={"n_embed": "hidden_size"},
    tiny={
        "model_type": "falcon",
        "vocab_size": 61,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "bias": True,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
