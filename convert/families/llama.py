"""Llama 2 and 3.x: RMS norms, rotary positions, grouped keys, gated SiLU."""

from collections.abc import Collection

from ingot.configs.model import Activation, Llama3Scaling, ModelConfig, Norm, RopeConfig
from ingot.configs.read import Section
from ingot.convert.family import Family, takes
from ingot.convert.weights import Drop
from ingot.errors import ConfigError, UnsupportedModelError

_ACTIVATIONS = {
    "silu": Activation.SILU, "swish": Activation.SILU, "gelu": Activation.GELU, "relu": Activation.RELU,
    "gelu_new": Activation.GELU_TANH, "gelu_pytorch_tanh": Activation.GELU_TANH,
}  # fmt: skip


def read_activation(section: Section, key: str, default: str) -> Activation:
    """The name of an activation function. Raises UnsupportedModelError for one that ingot does not have."""
    name = section.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            "the activation function is not supported", where=section.place(key), expected=", ".join(_ACTIVATIONS),
            got=name,
        )  # fmt: skip
    return _ACTIVATIONS[name]


def read_head_dim(section: Section, hidden: int, heads: int, *, hidden_key: str, heads_key: str) -> int:
    """hidden / heads, which must be whole."""
    if hidden % heads:
        raise ConfigError(
            "the hidden size cannot be shared evenly among the heads", where=section.place(hidden_key),
            expected=f"a multiple of {heads_key} ({heads})", got=str(hidden),
        )  # fmt: skip
    return hidden // heads


def read_rope(section: Section, head_dim: int, max_positions: int) -> RopeConfig:
    """transformers 4 spells rope_theta and rope_scaling, transformers 5 one object rope_parameters."""
    if section.has("rope_parameters") and section.has("rope_scaling"):
        raise ConfigError(
            "rope_parameters and rope_scaling are both given", where=section.place("rope_scaling"),
            hint="keep rope_parameters",
        )  # fmt: skip
    rope = section.section("rope_parameters" if section.has("rope_parameters") else "rope_scaling")
    outer_theta = section.number("rope_theta", 10000.0, above=0)
    theta = rope.number("rope_theta", outer_theta, above=0)
    if head_dim % 2:
        raise ConfigError("rotary positions need an even head_dim", where=section.where, got=str(head_dim))
    partial = rope.number("partial_rotary_factor", section.number("partial_rotary_factor", 1.0))
    if partial != 1:
        raise UnsupportedModelError(
            "partial rotary positions are not supported in this family",
            where=rope.place("partial_rotary_factor"), expected="1", got=str(partial),
        )  # fmt: skip
    legacy = rope.text("type", "default")
    match kind := rope.text("rope_type", legacy):
        case "default":
            return RopeConfig(theta=theta, rotary_dim=head_dim)
        case "linear":
            return RopeConfig(theta=theta, rotary_dim=head_dim, linear_factor=rope.number("factor", above=0))
        case "llama3":
            inner = rope.integer("original_max_position_embeddings", max_positions, minimum=1)
            scaling = Llama3Scaling(
                factor=rope.number("factor", above=0),
                low_freq_factor=rope.number("low_freq_factor", above=0),
                high_freq_factor=rope.number("high_freq_factor", above=0),
                original_positions=section.integer("original_max_position_embeddings", inner, minimum=1),
            )
            if scaling.high_freq_factor <= scaling.low_freq_factor:
                raise ConfigError(
                    "the frequency factors are in the wrong order", where=rope.place("high_freq_factor"),
                    expected=f"more than low_freq_factor ({scaling.low_freq_factor:g})",
                    got=f"{scaling.high_freq_factor:g}",
                )  # fmt: skip
            return RopeConfig(theta=theta, rotary_dim=head_dim, llama3=scaling)
        case _:
            raise UnsupportedModelError(
                "the scaling of rotary positions is not supported", where=rope.place("rope_type"),
                expected="default, linear, llama3", got=kind,
            )  # fmt: skip


def read(section: Section, names: Collection[str] | None) -> ModelConfig:
    """config.json of a LlamaForCausalLM; defaults are those of transformers."""
    hidden = section.integer("hidden_size", minimum=1)
    heads = section.integer("num_attention_heads", minimum=1)
    head_dim = (
        section.integer("head_dim", minimum=1)
        if section.has("head_dim")
        else read_head_dim(section, hidden, heads, hidden_key="hidden_size", heads_key="num_attention_heads")
    )
    max_positions = section.integer("max_position_embeddings", 2048, minimum=1)
    attention_bias = section.boolean("attention_bias", False)
    return ModelConfig(
        family="llama",
        vocab_size=section.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=section.integer("intermediate_size", minimum=1),
        num_layers=section.integer("num_hidden_layers", minimum=1),
        heads=heads,
        kv_heads=section.integer("num_key_value_heads", heads, minimum=1),
        head_dim=head_dim,
        max_positions=max_positions,
        norm=Norm.RMS,
        norm_eps=section.number("rms_norm_eps", 1e-6, above=0),
        activation=read_activation(section, "hidden_act", "silu"),
        gated_mlp=True,
        rope=read_rope(section, head_dim, max_positions),
        attention_scale=head_dim**-0.5,
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=section.boolean("mlp_bias", False),
        tied_embeddings=section.boolean("tie_word_embeddings", False),
    )


_LAYER = "model.layers.{i}"

FAMILY = Family(
    name="llama",
    read=read,
    rows=takes(
        {
            "embed/weight": "model.embed_tokens.weight",
            "layers.{i}/attn_norm/weight": f"{_LAYER}.input_layernorm.weight",
            "layers.{i}/attn/q/weight": f"{_LAYER}.self_attn.q_proj.weight",
            "layers.{i}/attn/q/bias": f"{_LAYER}.self_attn.q_proj.bias",
            "layers.{i}/attn/k/weight": f"{_LAYER}.self_attn.k_proj.weight",
            "layers.{i}/attn/k/bias": f"{_LAYER}.self_attn.k_proj.bias",
            "layers.{i}/attn/v/weight": f"{_LAYER}.self_attn.v_proj.weight",
            "layers.{i}/attn/v/bias": f"{_LAYER}.self_attn.v_proj.bias",
            "layers.{i}/attn/out/weight": f"{_LAYER}.self_attn.o_proj.weight",
            "layers.{i}/attn/out/bias": f"{_LAYER}.self_attn.o_proj.bias",
            "layers.{i}/mlp_norm/weight": f"{_LAYER}.post_attention_layernorm.weight",
            "layers.{i}/mlp/gate/weight": f"{_LAYER}.mlp.gate_proj.weight",
            "layers.{i}/mlp/gate/bias": f"{_LAYER}.mlp.gate_proj.bias",
            "layers.{i}/mlp/up/weight": f"{_LAYER}.mlp.up_proj.weight",
            "layers.{i}/mlp/up/bias": f"{_LAYER}.mlp.up_proj.bias",
            "layers.{i}/mlp/down/weight": f"{_LAYER}.mlp.down_proj.weight",
            "layers.{i}/mlp/down/bias": f"{_LAYER}.mlp.down_proj.bias",
            "norm/weight": "model.norm.weight",
            "lm_head/weight": "lm_head.weight",
        }
    ),
    drops=(Drop(f"{_LAYER}.self_attn.rotary_emb.inv_freq"),),  # Llama 2 files; computed from the configuration
    tiny={
        "model_type": "llama", "vocab_size": 61, "hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
)  # fmt: skip
