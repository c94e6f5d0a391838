"""LFM2 and LFM2.5: short convolutions between gates in most layers, attention in the others."""

import dataclasses
from collections.abc import Collection, Sequence

from ingot.configs.mixers import ShortConvConfig
from ingot.configs.model import ModelConfig, QkNorm
from ingot.configs.read import Section
from ingot.convert.families import llama
from ingot.convert.family import takes, weights_and_biases
from ingot.convert.hf_config import mixer_layers
from ingot.convert.weights import Row, Split, Take
from ingot.errors import ConfigError


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a Lfm2ForCausalLM; defaults are those of transformers. Old files call some keys otherwise."""
    layers = section.integer("num_hidden_layers", minimum=1)
    model = read_lfm2(section, intermediate=12288, attention=_attention_layers(section, layers))
    inner = section.integer("block_ff_dim", model.intermediate_size, minimum=1)
    return dataclasses.replace(model, intermediate_size=_inner_width(section, inner))


def read_lfm2(section: Section, intermediate: int, attention: Sequence[int]) -> ModelConfig:
    """What LFM2 shares with its mixture of experts, but for the width of its MLPs. intermediate: their usual one;
    attention: the layers that have it in files without layer_types."""
    model = llama.read_llama(
        section,
        positions=128_000,
        kv_heads=8,
        eps=1e-5,
        eps_key="norm_eps",
        theta=1e6,
        tied=True,
        has_attention_bias=False,
        activation_key=None,
        intermediate=intermediate,
    )
    mixer = ShortConvConfig(
        width=section.integer("conv_L_cache", 3, minimum=2), bias=section.boolean("conv_bias", False)
    )
    return dataclasses.replace(
        model,
        tied_embeddings=section.boolean("tie_embedding", model.tied_embeddings),
        qk_norm=QkNorm.HEAD,
        mixer=mixer,
        mixer_layers=mixer_layers(section, model.num_layers, "conv", attention),
    )


def _attention_layers(section: Section, layers: int) -> tuple[int, ...]:
    """Those of full_attn_idxs, for files without layer_types; all where it is absent or null."""
    named = section.numbers("full_attn_idxs") if section.has("full_attn_idxs") else range(layers)
    if not all(isinstance(each, int) and 0 <= each < layers for each in named):
        raise ConfigError(
            "full_attn_idxs has a wrong value",
            where=section.place("full_attn_idxs"),
            expected=f"a list of layers from 0 to {layers - 1}",
            got=repr(list(named))[:200],
        )
    return tuple(int(each) for each in named)


def _inner_width(section: Section, size: int) -> int:
    """Two thirds of the MLPs' width in config.json, times a factor, rounded up, unless it says that this is done."""
    factor = section.number("block_ffn_dim_multiplier", 1.0, above=0)
    multiple = section.integer("block_multiple_of", 256, minimum=1)
    if not section.boolean("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


_LAYER = "model.layers.{i}"
_ATTENTION = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    "out": "self_attn.out_proj",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}
_OTHERS = {
    "attn_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
    "conv/conv": "conv.conv",
    "conv/out": "conv.out_proj",
}
_NAMES = {**{f"attn/{name}": theirs for name, theirs in _ATTENTION.items()}, **_OTHERS}

FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="lfm2",
    models="LFM2 and LFM2.5, 350M to 2.6B",
    read=read,
    rows=takes(
        {
            "embed/weight": "model.embed_tokens.weight",
            "norm/weight": "model.embedding_norm.weight",
            "lm_head/weight": "lm_head.weight",
            **weights_and_biases({f"layers.{{i}}/{ours}": f"{_LAYER}.{theirs}" for ours, theirs in _NAMES.items()}),
        }
    )
    + tuple(
        Row(f"layers.{{i}}/conv/{name}/{kind}", Split(Take(f"{_LAYER}.conv.in_proj.{kind}"), parts=3, index=index))
        for index, name in enumerate(("b", "c", "x"))
        for kind in ("weight", "bias")
    ),
    nullable=("layer_types", "full_attn_idxs"),
    tiny={
        **{key: value for key, value in llama.FAMILY.tiny.items() if key not in ("head_dim", "rms_norm_eps")},
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 16,
    },
)
