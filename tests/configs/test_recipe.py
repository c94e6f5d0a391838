"""Recipes: those that ship are whole, and what a file says wrong is said back."""

from pathlib import Path

import pytest

from ingot.configs.build import BuildConfig
from ingot.configs.recipe import SHIPPED, LayerRule, Recipe
from ingot.errors import ConfigError, UsageError


def load(folder: Path, text: str) -> Recipe:
    (folder / "r.toml").write_text(text)
    return Recipe.load(folder / "r.toml")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_whole(path: Path) -> None:
    recipe = Recipe.load(Path(path.stem))
    assert recipe == Recipe.load(path)
    assert recipe.precision is not None
    BuildConfig(precision=recipe.precision, activations=recipe.activations or "auto", layers=recipe.layers)


def test_every_key(tmp_path: Path) -> None:
    text = """
        precision = "w4g128"
        lm_head_precision = "bf16"
        activations = "int8"
        [[layers]]
        pattern = "layers.0/*"
        precision = "w8"
        [[layers]]
        pattern = "*/down"
        activations = "bf16"
    """
    recipe = load(tmp_path, text)
    assert load(tmp_path, recipe.to_toml()) == recipe
    assert recipe == Recipe(
        precision="w4g128",
        lm_head_precision="bf16",
        activations="int8",
        layers=(LayerRule(pattern="layers.0/*", precision="w8"), LayerRule(pattern="*/down", activations="bf16")),
    )
    assert load(tmp_path, "") == Recipe()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precison = 'w8'", r"unknown key(.|\n)*r.toml:precison(.|\n)*did you mean 'precision'"),
        ("precision = 8", r"r.toml:precision(.|\n)*a string"),
        ("precision = ", "not valid TOML"),
        ("layers = 'all'", r"\[\[layers\]\] tables"),
        ("[[layers]]\nprecision = 'w8'", r"layers\[0\](.|\n)*pattern"),
        ("[[layers]]\npattern = '*'", "sets nothing"),
        ("[[layers]]\npattern = '*'\nactivation = 'bf16'", "did you mean 'activations'"),
    ],
)
def test_wrong_files(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text)


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(UsageError, match=r"(?s)nowhere.toml.*one of .*w4_careful"):
        Recipe.load(Path("nowhere.toml"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("w8a8", "ingot quantize --recipe w8a8"),
        ("w4a8", "ingot quantize --recipe w4g128"),
        ("fp8", "quantize --recipe f8 makes it"),
    ],
)
def test_a_recipe_that_no_build_makes_says_so(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"recipe {name} cannot be built.*{words}.*--precision w\d"):
        Recipe.load(Path(name))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (LayerRule(pattern="*", precision="w5"), r"precision of \*"),
        (LayerRule(pattern="*", precision="auto"), r"precision of \*"),
        (LayerRule(pattern="*", precision="fp8"), "--precision auto keeps it"),
        (LayerRule(pattern="*", activations="int4"), r"activations of \*"),
    ],
)
def test_values_are_checked_with_the_options(rule: LayerRule, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BuildConfig(layers=(rule,))
