"""Recipes that are worth measuring, and those that are picked."""

import dataclasses
from pathlib import Path

import pytest

from ingot.advise.front import AdviseOptions, Point, by_front, pick
from ingot.advise.points import LADDER, LossModel, kind_of, only, recipe_of, uniform, words
from ingot.builder.precision import choose_products
from ingot.builder.sensitivity import ProductLoss
from ingot.configs.build import BuildConfig
from ingot.configs.recipe import Recipe
from ingot.dtypes import Precision
from ingot.errors import UsageError

LOSSES = dict(zip(LADDER, (4e-2, 2e-2, 1e-4, 1e-6), strict=True))
BYTES = dict(zip(LADDER, (520, 560, 1000, 2000), strict=True))


def product(name: str, scale: float) -> ProductLoss:
    losses = {precision: scale * loss for precision, loss in LOSSES.items()}
    return ProductLoss(name=name, losses=losses, int8=1e-4, nbytes=BYTES)


PRODUCTS = [product(f"layers.{i}/{kind}", 1 + i) for i in range(3) for kind in ("qkv", "down")]
PRODUCTS.append(product("lm_head", 1))
MODEL = LossModel.fit(PRODUCTS, {"layers.*/qkv": 0.06, "layers.*/down": 0.6, "lm_head": 0.01})


def test_the_model_gives_back_what_it_was_fitted_to() -> None:
    alone = MODEL.predicted(only(PRODUCTS, "layers.*/down")) - MODEL.predicted(uniform(PRODUCTS, "bf16"))
    assert alone == pytest.approx(0.6)
    assert kind_of("layers.12/down") == "layers.*/down"


def test_mixtures_lie_between_and_spend_bytes_where_loss_is() -> None:
    found = MODEL.mixtures(3)
    sizes = [MODEL.nbytes(each) for each in (uniform(PRODUCTS, "w4g128"), *found, uniform(PRODUCTS, "w8"))]
    losses = [MODEL.predicted(each) for each in (uniform(PRODUCTS, "w4g128"), *found)]
    assert sizes == sorted(set(sizes))
    assert losses == sorted(losses, reverse=True)
    first = found[0]
    assert LADDER.index(first["layers.2/down"]) > LADDER.index(first["layers.0/qkv"])
    assert words(uniform(PRODUCTS, "w8")) == "w8"
    assert words(first).startswith("w4g128 x ")


@pytest.mark.parametrize("choice", [*MODEL.mixtures(3), *(uniform(PRODUCTS, each) for each in LADDER)])
def test_a_recipe_builds_these_precisions(tmp_path: Path, choice: dict[str, str]) -> None:
    file = tmp_path / "r.toml"
    file.write_text(recipe_of(choice, "int8").to_toml())
    recipe = Recipe.load(file)
    assert recipe == recipe_of(choice, "int8")
    assert recipe.precision is not None
    config = BuildConfig(
        precision=recipe.precision,
        lm_head_precision=recipe.lm_head_precision,
        activations=recipe.activations or "bf16",
        layers=recipe.layers,
    )
    found = choose_products(config, Precision.parse(recipe.precision), {}, list(choice))
    assert {name: str(each.precision) for name, each in found.items()} == choice
    assert {each.activations for name, each in found.items() if choice[name] != "bf16"} <= {"int8"}


def point(weights: str, nbytes: int, kl: float, one: float, many: float) -> Point:
    return Point(
        weights=weights,
        activations="int8",
        recipe="",
        nbytes=nbytes,
        serving=nbytes + 10,
        decode={1: one, 32: many},
        prefill=1.0,
        kl=kl,
        perplexity=10 * (1 + kl),
        modelled_kl=None,
    )


POINTS = by_front(
    [
        point("bf16", 400, 0.001, 10, 300),
        point("w8", 200, 0.01, 20, 600),
        point("worse", 210, 0.02, 20.2, 500),  # a little faster than timings tell apart
        point("w4", 100, 0.1, 40, 500),
    ],
    (1, 32),
)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"kl_budget": 0.2}, "w4"),
        ({"kl_budget": 0.2, "batch": 32}, "w8"),
        ({"kl_budget": 0.05}, "w8"),
        ({"ppl_budget": 1.002}, "bf16"),
        ({"memory": 210}, "w4"),
        ({"pick": 3}, "bf16"),
    ],
)
def test_the_fastest_within_the_budgets_is_picked(asked: dict[str, float], name: str) -> None:
    assert [each.weights for each in POINTS] == ["w4", "w8", "bf16", "worse"]
    assert [each.front for each in POINTS] == [True, True, True, False]
    assert POINTS[pick(AdviseOptions(**asked), POINTS, 10.0)].weights == name  # type: ignore[arg-type]


def test_what_cannot_be_picked_is_said() -> None:
    with pytest.raises(UsageError, match=r"no recipe keeps to the budgets(.|\n)*bf16, needs 410 (.|\n)*w4, has KL 0.1"):
        pick(AdviseOptions(kl_budget=0.05, memory=150), POINTS, 10.0)
    with pytest.raises(UsageError, match=r"not a point of the table(.|\n)*1 to 3"):
        pick(AdviseOptions(pick=4), POINTS, 10.0)
    with pytest.raises(UsageError, match="--pick cannot be combined with"):
        AdviseOptions(pick=1, kl_budget=0.1)
    assert not dataclasses.replace(AdviseOptions(), batch=4).picks
