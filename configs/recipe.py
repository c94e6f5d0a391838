"""Recipes: TOML files that set precision and activations, for the whole model and by layer.

    precision = "w4g128"            # as the options of `ingot build`
    lm_head_precision = "w8"
    activations = "auto"

    [[layers]]
    pattern = "layers.*/down"       # names of products as `ingot inspect` lists them; * and ? as in file names
    precision = "w8"
    activations = "bf16"

The last entry whose pattern fits a product counts. Every key may be left out, but each entry sets something.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path

from ingot.configs.read import Section, nearest, parse_toml
from ingot.errors import ConfigError, UsageError

SHIPPED = Path(__file__).parent / "recipes"
_SUFFIX = ".toml"

NOT_YET = {
    "w8a8": "ingot quantize --recipe w8a8 makes it, with calibration; --precision w8 --activations int8 needs none",
    "w4a8": "ingot quantize --recipe w4g128 calibrates weights; --precision w4g128 --activations int8 needs none",
    "fp8": "ingot quantize --recipe f8 makes it, and --precision auto keeps it; --precision w8 has as many bits",
}
"""Precisions that this version cannot build, and what it has instead."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """What the products that fit `pattern` get; None: as all others."""

    pattern: str
    precision: str | None = None
    activations: str | None = None

    def fitting(self, products: Sequence[str]) -> list[str]:
        """Raises UsageError where the pattern fits no product."""
        found = fnmatch.filter(products, self.pattern)
        if not found:
            raise UsageError(
                "a pattern of the recipe fits no matmul of the model",
                got=repr(self.pattern),
                expected=f"names such as {', '.join(products[:4])}, {products[-1]}",
                hint=nearest(self.pattern, products),
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """None: not said."""

    precision: str | None = None
    lm_head_precision: str | None = None
    activations: str | None = None
    layers: tuple[LayerRule, ...] = ()

    def to_toml(self) -> str:
        """The file that `load` reads as this recipe."""
        lines = _lines(self, ("precision", "lm_head_precision", "activations"))
        for rule in self.layers:
            lines += ["", "[[layers]]", *_lines(rule, ("pattern", "precision", "activations"))]
        return "\n".join(lines) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Recipe":
        """A file, or the name of a recipe that ships with ingot. Raises UsageError, ConfigError."""
        shipped = {each.stem: each for each in sorted(SHIPPED.glob("*" + _SUFFIX))}
        file = path if path.is_file() else shipped.get(str(path), path)
        try:
            text = file.read_bytes()
        except OSError as error:
            if str(path) in NOT_YET:
                raise UsageError(
                    f"recipe {path} cannot be built: {NOT_YET[str(path)]}", expected=", ".join(shipped)
                ) from None
            raise UsageError(
                "the recipe cannot be read",
                where=str(path),
                got=error.strerror,
                expected=f"a TOML file, or one of {', '.join(shipped)}",
                hint="give --precision for the same precision everywhere, e.g. --precision w8",
            ) from error
        return _recipe(parse_toml(text, str(file)))


def _recipe(section: Section) -> Recipe:
    recipe = Recipe(
        precision=_word(section, "precision"),
        lm_head_precision=_word(section, "lm_head_precision"),
        activations=_word(section, "activations"),
        layers=tuple(map(_rule, section.tables("layers"))),
    )
    section.refuse_unknown()
    return recipe


def _rule(section: Section) -> LayerRule:
    rule = LayerRule(
        pattern=section.text("pattern"),
        precision=_word(section, "precision"),
        activations=_word(section, "activations"),
    )
    section.refuse_unknown()
    if rule.precision is None and rule.activations is None:
        raise ConfigError(
            "an entry of the recipe sets nothing", where=section.where, expected="precision or activations"
        )
    return rule


def _lines(values: "Recipe | LayerRule", keys: Sequence[str]) -> list[str]:
    """Names and patterns need no escapes but those of JSON, which TOML has too."""
    said = ((key, getattr(values, key)) for key in keys)
    return [f"{key} = {json.dumps(value)}" for key, value in said if value is not None]


def _word(section: Section, key: str) -> str | None:
    return section.text(key) if section.has(key) else None
