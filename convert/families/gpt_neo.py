"""GPT-Neo and TinyStories: a GPT-2 with separate projections, unscaled scores, and windows in every other layer."""

from collections.abc import Collection
from typing import Any

from ingot.configs.model import ModelConfig, Norm
from ingot.configs.read import Section
from ingot.convert.activations import read_activation
from ingot.convert.family import Family, takes, weights_and_biases
from ingot.convert.hf_config import read_head_dim
from ingot.convert.weights import Drop
from ingot.errors import ConfigError

_USUAL = [[["global", "local"], 12]]


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a GPTNeoForCausalLM; defaults are those of transformers."""
    hidden, heads = section.integer("hidden_size", minimum=1), section.integer("num_heads", minimum=1)
    layers = section.integer("num_layers", minimum=1)
    return ModelConfig(
        family="gpt_neo",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("intermediate_size", 4 * hidden, minimum=1),
        num_layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_heads"),
        max_positions=section.integer("max_position_embeddings", 2048, minimum=1),
        norm=Norm.LAYER,
        norm_eps=section.number("layer_norm_epsilon", 1e-5, above=0),
        activation=read_activation(section, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        attention_scale=1.0,
        windows=_windows(section, layers),
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=section.boolean("tie_word_embeddings", True),
    )


def _windows(section: Section, layers: int) -> tuple[int, ...]:
    """attention_types lists kinds of layers, each with how often they follow one another. attention_layers, if it is
    there, has the kind of each layer, and wins, as in transformers."""
    window = section.integer("window_size", 256, minimum=1)
    kinds = list(section.words("attention_layers"))
    key, expected = "attention_layers", f"global or local, {layers} times"
    if not section.has(key):
        key, expected = (
            "attention_types",
            f"for {layers} layers, such as [[['global', 'local'], {max(1, layers // 2)}]]",
        )
        kinds = _expand(section.raw(key) if section.has(key) else _USUAL, layers)
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        raise ConfigError(
            f"{key} does not say global or local for each layer",
            where=section.place(key),
            expected=expected,
            got=repr(section.raw(key) if section.has(key) else _USUAL)[:200],
        )
    windows = tuple(window if kind == "local" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _expand(types: Any, layers: int) -> list[str]:
    """The kinds of attention_types in order; empty if it has another form."""
    try:
        kinds = [kind for some, count in types for _ in range(min(count, layers + 1)) for kind in some]
        return kinds if all(isinstance(kind, str) for kind in kinds) else []
    except (TypeError, ValueError):
        return []


_LAYER = "transformer.h.{i}"

FAMILY = Family(
    name="gpt_neo",
    models="GPT-Neo 125M to 2.7B, TinyStories",
    read=read,
    rows=takes(
        {
            "embed/weight": "transformer.wte.weight",
            "positions/weight": "transformer.wpe.weight",
            **{
                f"layers.{{i}}/attn/{x}/weight": f"{_LAYER}.attn.attention.{x}_proj.weight"
                for x in ("q", "k", "v", "out")
            },
            "layers.{i}/attn/out/bias": f"{_LAYER}.attn.attention.out_proj.bias",
            **weights_and_biases(
                {
                    "layers.{i}/attn_norm": f"{_LAYER}.ln_1",
                    "layers.{i}/mlp_norm": f"{_LAYER}.ln_2",
                    "layers.{i}/mlp/up": f"{_LAYER}.mlp.c_fc",
                    "layers.{i}/mlp/down": f"{_LAYER}.mlp.c_proj",
                    "norm": "transformer.ln_f",
                }
            ),
            "lm_head/weight": "lm_head.weight",
        }
    ),
    # old files keep their causal masks
    drops=tuple(Drop(f"{_LAYER}.attn.attention.{x}") for x in ("bias", "masked_bias")),
    nullable=("intermediate_size", "attention_types"),
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    tiny={
        "model_type": "gpt_neo",
        "vocab_size": 61,
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 3,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
)
