"""What a user asks of `ingot quantize`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ingot.configs.read import nearest
from ingot.configs.recipe import NOT_YET, SHIPPED, LayerRule, Recipe
from ingot.errors import UsageError

RECIPES = ("w4g128", "w4g64", "w4g32", "w8", "w8a8", "f8")
CODES = ("auto", "symmetric", "asymmetric")
DEFAULT_TOKENS = 8192
WAYS = ("nearest", "gptq", "folded")  # of making a product's weight; "plain" is one to compare with


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    """precision: of every product but lm_head; w8a8 is w8 made for inputs that are int8, f8 is E4M3.

    layers              rules that come after it; the last one that fits a product counts
    codes               of 4 bits: symmetric: whole numbers, or what loses less of these and a table of uneven levels
                        (auto); asymmetric: whole numbers and a zero point for each group
    calibration_tokens  of the text, at most
    max_mem             bytes the work may use
    ways                that are tried for each product; "folded" brings "gptq" with it
    """

    output_dir: Path
    precision: str
    layers: tuple[LayerRule, ...] = ()
    codes: str = "auto"
    calibration_tokens: int = DEFAULT_TOKENS
    max_mem: int | None = None
    ways: tuple[str, ...] = WAYS

    def __post_init__(self) -> None:
        for where, precision in (("the recipe", self.precision), *((r.pattern, r.precision) for r in self.layers)):
            if precision not in RECIPES:
                raise UsageError(
                    f"ingot quantize does not support {precision}",
                    where=where,
                    expected=", ".join(RECIPES),
                    got=str(precision),
                )
        if self.codes not in CODES:
            raise UsageError(f"unknown --codes {self.codes!r:.40}", expected=", ".join(CODES), got=self.codes)
        if not self.ways or not {*self.ways} <= {*WAYS, "plain"}:
            raise UsageError(
                "unknown ways of rounding", expected=f"some of {', '.join(WAYS)}, plain", got=", ".join(self.ways)
            )
        if self.calibration_tokens < 1:
            raise UsageError("calibration_tokens must be at least 1", got=str(self.calibration_tokens))

    def precisions(self, products: Sequence[str]) -> dict[str, str]:
        """By product. Raises UsageError for a pattern that fits none."""
        found = dict.fromkeys(products, self.precision)
        for rule in self.layers:
            found |= dict.fromkeys(rule.fitting(products), str(rule.precision))
        return found


def read_recipe(name: str) -> tuple[str, tuple[LayerRule, ...]]:
    """(precision, rules) of a precision, a TOML file, or the name of a recipe that ships with ingot.

    Raises UsageError for one that says what a Checkpoint does not hold.
    """
    if name in RECIPES:
        return name, ()
    shipped = [each.stem for each in SHIPPED.glob("*.toml")]
    if not Path(name).is_file() and name not in (*shipped, *NOT_YET):
        raise UsageError(
            f"there is no recipe {name!r:.60}",
            got=name,
            expected=f"{', '.join(RECIPES)}, a TOML file, or one of {', '.join(sorted(shipped))}",
            hint=nearest(name, [*RECIPES, *shipped]) or "give the path of a TOML file, or one of these names",
        )
    if name in NOT_YET and not Path(name).is_file():
        raise UsageError(f"recipe {name} is not made: {NOT_YET[name]}", expected=", ".join(RECIPES))
    recipe = Recipe.load(Path(name))
    said = {"lm_head_precision": recipe.lm_head_precision, "activations": recipe.activations}
    said |= {f"activations of {rule.pattern}": rule.activations for rule in recipe.layers}
    for key, value in said.items():
        if value is not None and (key, value) != ("lm_head_precision", "w8"):
            raise UsageError(
                f"{key.split()[0]} belongs to ingot build, not to ingot quantize",
                where=f"{name}: {key}",
                got=value,
                hint=f"leave {key.split()[0]} out, and give it to ingot build",
            )
    if recipe.precision is None:
        raise UsageError("the recipe names no precision", where=name, expected=", ".join(RECIPES))
    return recipe.precision, recipe.layers
