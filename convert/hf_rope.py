"""How config.json spells rotary positions: rope_theta and rope_scaling, or one object rope_parameters."""

import dataclasses
import math
from collections.abc import Sequence

from ingot.configs.model import Llama3Scaling, ModelConfig, RopeConfig, YarnScaling
from ingot.configs.read import Section
from ingot.errors import ConfigError, UnsupportedModelError, UsageError

# Keys of the rotary object that may be null: what they say then follows from the others.
ROPE_NULLABLE = ("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def read_rope(
    section: Section,
    head_dim: int,
    max_positions: int,
    *,
    theta_key: str = "rope_theta",
    theta: float = 10000.0,
    partial_key: str = "partial_rotary_factor",
    partial: float | None = None,
    kinds: Sequence[str] = KINDS,
) -> RopeConfig:
    """transformers 4 spells rope_theta and rope_scaling, transformers 5 one object rope_parameters.

    partial: the part of a head that rotates where the configuration does not say; None: always all of it.
    kinds: those of the family.
    """
    rope = rope_section(section)
    theta = read_beside(rope, "rope_theta", section, theta_key, theta)
    if partial is None and section.is_null(partial_key):  # harmless where nothing reads it
        factor = rope.number("partial_rotary_factor", 1.0, above=0)
    else:
        factor = read_beside(rope, "partial_rotary_factor", section, partial_key, partial or 1.0)
    said = "partial_rotary_factor" in rope.values()
    place, key = (rope, "partial_rotary_factor") if said else (section, partial_key)
    _require_rotating_part(place, key, factor, whole=partial is None)
    rotary_dim = int(head_dim * factor)
    return read_frequencies(rope, section, theta, rotary_dim, max_positions, flags=rope, kinds=kinds)


def _require_rotating_part(place: Section, key: str, factor: float, *, whole: bool) -> None:
    """Raise UnsupportedModelError where more than a head would rotate, or less in a family of whole heads."""
    if factor > 1 or (whole and factor != 1):
        raise UnsupportedModelError(
            f"{key} other than 1 is not supported in this family" if whole else f"{key} is above 1",
            where=place.place(key),
            expected="1" if whole else "at most 1",
            got=f"{factor:g}",
        )


def require_whole_heads(rope: Section) -> None:
    """Raise an error where the rotary object of a family whose heads rotate as a whole names a part of them."""
    key = "partial_rotary_factor"
    _require_rotating_part(rope, key, rope.number(key, 1.0, above=0), whole=True)


def interleaved(rope: RopeConfig | None) -> RopeConfig | None:
    """The same rotation of pairs that lie side by side."""
    return None if rope is None else dataclasses.replace(rope, interleaved=True)


def refuse_kinds_of_layers(section: Section) -> None:
    """Raise UnsupportedModelError for a rotation of its own in some layers."""
    rope = rope_section(section)
    for key in ("full_attention", "sliding_attention"):
        if rope.has(key):
            raise UnsupportedModelError(
                f"rope_parameters has an object {key}, but all layers of this family rotate alike",
                where=rope.place(key),
                hint=f"move the content of {key} one level up",
            )


def read_beside(rope: Section, key: str, section: Section, outer_key: str, default: float) -> float:
    """A number of the rotary object; what stands beside it counts where the object does not say."""
    if rope.has(key) or rope.is_null(key):
        section.has(outer_key)
        return rope.number(key, above=0)
    return section.number(outer_key, default, above=0)


def rope_section(section: Section) -> Section:
    """The object that holds the scaling, whatever it is called; an absent one is empty."""
    if section.has("rope_parameters") and section.has("rope_scaling"):
        raise ConfigError(
            "rope_parameters and rope_scaling are both given",
            where=section.place("rope_scaling"),
            hint="keep rope_parameters",
        )
    return section.section("rope_parameters" if section.has("rope_parameters") else "rope_scaling")


def read_frequencies(
    rope: Section,
    section: Section,
    theta: float,
    rotary_dim: int,
    max_positions: int,
    *,
    flags: Section,
    kinds: Sequence[str] = KINDS,
) -> RopeConfig:
    """The rotation of one kind of layers. flags: where transformers looks for `truncate`.

    Raises UnsupportedModelError for a scaling that ingot, or the family, does not have.
    """
    if rotary_dim % 2 or rotary_dim < 2:
        raise ConfigError(
            "the number of rotary dimensions is odd or below 2",
            where=section.where,
            expected="an even number: the size of a head, times partial_rotary_factor or rotary_pct where one is given",
            got=str(rotary_dim),
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    kind = "yarn" if kind == "deepseek_yarn" else kind  # as vLLM calls DeepSeek's, and some configurations with it
    if kind not in kinds:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported", where=rope.place("rope_type"), expected=", ".join(kinds), got=kind
        )
    match kind:
        case "default":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim)
        case "linear":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim, linear_factor=rope.number("factor", above=0))
        case "llama3":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim, llama3=_llama3(rope, section, max_positions))
        case "yarn":
            return _yarn(rope, section, theta, rotary_dim, max_positions, flags)
        case "longrope" | "su":
            return _longrope(rope, section, theta, rotary_dim, max_positions)
        case _:
            assert kind == "dynamic", "one of the family's kinds"
            rope.number("factor", above=0)  # changes texts that are longer than the model's positions: none is here
            return RopeConfig(theta=theta, rotary_dim=rotary_dim)


def _llama3(rope: Section, section: Section, max_positions: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor", above=0),
        low_freq_factor=rope.number("low_freq_factor", above=0),
        high_freq_factor=rope.number("high_freq_factor", above=0),
        original_positions=_original_positions(rope, section, max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            "high_freq_factor is not more than low_freq_factor",
            where=rope.place("high_freq_factor"),
            expected=f"more than low_freq_factor ({scaling.low_freq_factor:g})",
            got=f"{scaling.high_freq_factor:g}",
        )
    return scaling


def _yarn(
    rope: Section, section: Section, theta: float, rotary_dim: int, max_positions: int, flags: Section
) -> RopeConfig:
    """The factor counts from original_max_position_embeddings: the model has that many times as many positions, even
    where max_position_embeddings was left as it had been."""
    original = _original_positions(rope, section, max_positions)
    factor = rope.number("factor", max_positions / original if rope.is_null("factor") else None, above=0)
    scaling = YarnScaling(
        factor=factor,
        original_positions=original,
        truncate=flags.boolean("truncate", True),
        beta_fast=rope.number("beta_fast", 32.0, above=0),
        beta_slow=rope.number("beta_slow", 1.0, above=0),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise ConfigError(
            "beta_fast is less than beta_slow",
            where=rope.place("beta_fast"),
            expected=f"at least beta_slow ({scaling.beta_slow:g})",
            got=f"{scaling.beta_fast:g}",
        )
    require_growing_waves(rope, theta)
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        yarn=scaling,
        scale=_yarn_scale(rope, factor),
        positions=max(max_positions, int(original * factor)),
    )


def require_growing_waves(rope: Section, theta: float) -> None:
    """Raise ConfigError where yarn's ramp has no logarithm to divide by."""
    if theta <= 1:
        raise ConfigError(
            "rope_theta is too small for rope_type yarn",
            where=rope.place("rope_theta"),
            expected="above 1",
            got=f"{theta:g}",
        )


def _yarn_scale(rope: Section, factor: float) -> float:
    """attention_factor, or what follows from the factor: with mscale and mscale_all_dim a ratio of two such scales."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = (rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim"))
    usual = scale(above) / scale(below) if above and below else scale(1.0)
    return rope.number("attention_factor", usual, above=0)


def _original_positions(rope: Section, section: Section, max_positions: int) -> int:
    """The positions a model was first trained with; what stands outside of `rope` counts more."""
    key = "original_max_position_embeddings"
    return section.integer(key, rope.integer(key, max_positions, minimum=1), minimum=1)


def _longrope(rope: Section, section: Section, theta: float, rotary_dim: int, max_positions: int) -> RopeConfig:
    """The short factors, which hold up to the original positions. Where a text is longer, the long ones rotate every
    token another way, its first tokens too: no KV cache can follow, so a conversion is for one of the two."""
    short, long = (_factors(rope, key, rotary_dim // 2) for key in ("short_factor", "long_factor"))
    key = "original_max_position_embeddings"
    if not (rope.has(key) or section.has(key)):
        raise ConfigError(f"{key} is missing, which rope_type longrope needs", where=rope.place(key))
    original = _original_positions(rope, section, max_positions)
    stretch = rope.number("factor", max_positions / original, above=0)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        factors=short,
        long_factors=long,
        positions=min(max_positions, original),
        scale=rope.number("attention_factor", usual, above=0),
    )


def _factors(rope: Section, key: str, count: int) -> tuple[float, ...]:
    factors = rope.numbers(key)
    if len(factors) != count or min(factors) <= 0:
        raise ConfigError(
            f"{key} has a wrong number of factors, or factors that are not above 0",
            where=rope.place(key),
            expected=f"{count} numbers above 0",
            got=f"{len(factors)} numbers",
        )
    return factors


def _positions_kept(model: ModelConfig, section: Section) -> tuple[str, ...]:
    """A sentence where a family's reader keeps fewer positions than the configuration promises."""
    most = section.integer("max_position_embeddings", model.max_positions)
    if most <= model.max_positions:
        return ()
    kept = f"the model keeps {model.max_positions:,} of {most:,} positions: beyond them"
    if model.sparse_beyond == model.max_positions:
        return (f"{kept} it attends to chosen tokens alone (sparse attention), which is not supported",)
    return (f"{kept} it computes otherwise",)


def choose_factors(model: ModelConfig, section: Section, wanted: str | None) -> tuple[ModelConfig, tuple[str, ...]]:
    """(the model with one of its longrope factors, a sentence where it loses positions). wanted: short or long.

    Raises UsageError where a choice was made for a model that has none.
    """
    rope = model.rope
    if rope is None or not rope.long_factors:
        if wanted is not None:
            raise UsageError(
                f"--rope_factors {wanted}: the model has no longrope factors",
                where=section.where,
                hint="leave --rope_factors out",
            )
        return model, _positions_kept(model, section)
    most = section.integer("max_position_embeddings", model.max_positions)
    if wanted == "long":
        longer = dataclasses.replace(rope, factors=rope.long_factors, long_factors=(), positions=most)
        return dataclasses.replace(model, rope=longer, max_positions=most), ()
    model = dataclasses.replace(model, rope=dataclasses.replace(rope, long_factors=()))
    if most <= model.max_positions or wanted == "short":
        return model, ()
    return model, (
        f"the model keeps {model.max_positions:,} of {most:,} positions, for which its short rotary factors hold; "
        "--rope_factors long takes the long ones for texts of any length",
    )
