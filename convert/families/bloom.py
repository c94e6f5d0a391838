"""BLOOM: scores that fall with the distance, normed embeddings, layer norms, q, k, v stored head by head."""

from collections.abc import Collection

from ingot.configs.model import AlibiConfig, ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.alibi import slopes_of
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim
from ingot.convert.weights import KeyGroups, Row, Take
from ingot.errors import ConfigError, UnsupportedModelError

_HARMLESS = (
    "attention_softmax_in_fp32",  # as all scores are here
    "masked_softmax_fusion",
    "n_inner",  # the MLP is four times as wide as the model, whatever stands there
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",  # sums in parts, for bits of another program
    "unk_token_id",
)


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a BloomForCausalLM; defaults are those of transformers. Old files have other names of sizes."""
    hidden, heads = _size(section, "hidden_size", "n_embed"), _size(section, "n_head", "num_attention_heads")
    head_dim = read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="n_head")
    for key in _HARMLESS:
        section.has(key)
    if section.boolean("apply_residual_connection_post_layernorm", False):
        raise UnsupportedModelError(
            "apply_residual_connection_post_layernorm true is not supported",
            where=section.place("apply_residual_connection_post_layernorm"),
            expected="false",
            got="true",
        )
    return ModelConfig(
        family="bloom",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=_size(section, "n_layer", "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        max_positions=section.integer("seq_length", 2048, minimum=1),  # of its training; transformers has no limit
        norm=Norm.LAYER,
        norm_eps=section.number("layer_norm_epsilon", 1e-5, above=0),
        activation="gelu_tanh",
        gated_mlp=False,
        rope=None,
        alibi=AlibiConfig(slopes=slopes_of(heads)),
        embedding_norm=True,
        attention_scale=head_dim**-0.5,
        fused_qkv=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


def _size(section: Section, key: str, other: str) -> int:
    """A size that has two names, which must agree."""
    name = key if section.has(key) else other
    size = section.integer(name, minimum=1)
    if section.has(other) and section.raw(other) != size:
        raise ConfigError(
            f"{other} contradicts {name}",
            where=section.place(other),
            expected=f"{size}, the value of {name}",
            got=repr(section.raw(other))[:200],
        )
    return size


_LAYER = "transformer.h.{i}"

FAMILY = Family(
    name="bloom",
    models="BLOOM and BLOOMZ, 560M to 176B",
    read=read,
    rows=(
        *takes(
            {
                "embed/weight": "transformer.word_embeddings.weight",
                **weights_and_biases(
                    {
                        "embed_norm": "transformer.word_embeddings_layernorm",
                        "layers.{i}/attn_norm": f"{_LAYER}.input_layernorm",
                        "layers.{i}/attn/out": f"{_LAYER}.self_attention.dense",
                        "layers.{i}/mlp_norm": f"{_LAYER}.post_attention_layernorm",
                        "layers.{i}/mlp/up": f"{_LAYER}.mlp.dense_h_to_4h",
                        "layers.{i}/mlp/down": f"{_LAYER}.mlp.dense_4h_to_h",
                        "norm": "transformer.ln_f",
                    }
                ),
                "lm_head/weight": "lm_head.weight",
            }
        ),
        *(
            Row(
                f"layers.{{i}}/attn/qkv/{kind}",
                KeyGroups(
                    Take(f"{_LAYER}.self_attention.query_key_value.{kind}"),
                    ("queries", "kv_head", "kv_head"),
                    (0, 1, 2),
                ),
            )
            for kind in ("weight", "bias")
        ),
    ),
    optional_prefix="transformer.",
    tiny={
        "model_type": "bloom",
        "vocab_size": 61,
        "hidden_size": 48,
        "n_layer": 2,
        "n_head": 6,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
