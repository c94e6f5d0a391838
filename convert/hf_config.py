"""What several families spell alike in config.json: activation, head size, rotary positions."""

from ingot.configs.model import Activation, Llama3Scaling, RopeConfig
from ingot.configs.read import Section
from ingot.errors import ConfigError, UnsupportedModelError

_ACTIVATIONS = {
    "silu": Activation.SILU, "swish": Activation.SILU, "gelu": Activation.GELU, "relu": Activation.RELU,
    "gelu_python": Activation.GELU,
    "gelu_new": Activation.GELU_TANH, "gelu_fast": Activation.GELU_TANH, "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_python_tanh": Activation.GELU_TANH,
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
