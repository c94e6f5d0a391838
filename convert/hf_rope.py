"""How config.json spells rotary positions: rope_theta and rope_scaling, or one object rope_parameters."""

import math

from ingot.configs.model import Llama3Scaling, RopeConfig
from ingot.configs.read import Section
from ingot.errors import ConfigError, UnsupportedModelError


def read_rope(
    section: Section, head_dim: int, max_positions: int, *, theta_key: str = "rope_theta", theta: float = 10000.0,
    partial_key: str = "partial_rotary_factor", partial: float | None = None,
) -> RopeConfig:  # fmt: skip
    """transformers 4 spells rope_theta and rope_scaling, transformers 5 one object rope_parameters.

    partial: the part of a head that turns where the configuration does not say; None: always all of it.
    """
    rope = rope_section(section)
    outer_theta = section.number(theta_key, theta, above=0)
    factor = rope.number("partial_rotary_factor", section.number(partial_key, partial or 1.0, above=0), above=0)
    if (partial is None and factor != 1) or factor > 1:
        raise UnsupportedModelError(
            "partial rotary positions are not supported in this family",
            where=rope.place("partial_rotary_factor"), expected="1", got=f"{factor:g}",
        )  # fmt: skip
    rotary_dim = int(head_dim * factor)
    return read_frequencies(rope, section, rope.number("rope_theta", outer_theta, above=0), rotary_dim, max_positions)


def rope_section(section: Section) -> Section:
    """The object that holds the scaling, whatever it is called; an absent one is empty."""
    if section.has("rope_parameters") and section.has("rope_scaling"):
        raise ConfigError(
            "rope_parameters and rope_scaling are both given", where=section.place("rope_scaling"),
            hint="keep rope_parameters",
        )  # fmt: skip
    return section.section("rope_parameters" if section.has("rope_parameters") else "rope_scaling")


def read_frequencies(rope: Section, section: Section, theta: float, rotary_dim: int, max_positions: int) -> RopeConfig:
    """The rotation of one kind of layers. Raises UnsupportedModelError for a scaling that ingot does not have."""
    if rotary_dim % 2 or rotary_dim < 2:
        raise ConfigError("rotary positions need an even head_dim", where=section.where, got=str(rotary_dim))
    legacy = rope.text("type", "default")
    match kind := rope.text("rope_type", legacy):
        case "default":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim)
        case "linear":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim, linear_factor=rope.number("factor", above=0))
        case "llama3":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim, llama3=_llama3(rope, section, max_positions))
        case "longrope" | "su":
            return _longrope(rope, section, theta, rotary_dim, max_positions)
        case _:
            raise UnsupportedModelError(
                "the scaling of rotary positions is not supported", where=rope.place("rope_type"),
                expected="default, linear, llama3, longrope", got=kind,
            )  # fmt: skip


def _llama3(rope: Section, section: Section, max_positions: int) -> Llama3Scaling:
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
            expected=f"more than low_freq_factor ({scaling.low_freq_factor:g})", got=f"{scaling.high_freq_factor:g}",
        )  # fmt: skip
    return scaling


def original_positions(rope: Section, section: Section, max_positions: int) -> int:
    """The positions a longrope model was first trained with: up to there its short factors hold."""
    inner = rope.integer("original_max_position_embeddings", max_positions, minimum=1)
    return section.integer("original_max_position_embeddings", inner, minimum=1)


def _longrope(rope: Section, section: Section, theta: float, rotary_dim: int, max_positions: int) -> RopeConfig:
    """The short factors: the long ones turn every token another way once a text is long, its first tokens too."""
    factors = rope.numbers("short_factor")
    rope.numbers("long_factor")
    if len(factors) != rotary_dim // 2 or min(factors) <= 0:
        raise ConfigError(
            "the factors of the frequencies do not fit", where=rope.place("short_factor"),
            expected=f"{rotary_dim // 2} numbers above 0", got=f"{len(factors)} numbers",
        )  # fmt: skip
    original = original_positions(rope, section, max_positions)
    stretch = rope.number("factor", max_positions / original, above=0)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    scale = rope.number("attention_factor", usual, above=0)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, factors=factors, scale=scale)
