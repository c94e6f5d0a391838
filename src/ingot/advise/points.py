"""Recipes worth measuring: the same precision everywhere, and mixtures of them.

A mixture begins with the smallest precision in every product. Then one product after the other gets the next better
precision, always the one that lessens the loss most for its bytes. The loss is additive:

    KL = sum over products of c[kind] * (relative squared error of the product's outputs)

c comes from builds in which one kind of product alone has a small precision.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ingot.builder.sensitivity import ProductLoss
from ingot.configs.recipe import LayerRule, Recipe
from ingot.weight_formats import FORMATS

LM_HEAD = "lm_head"
LADDER = ("w4g128", "w4g32", "w8", "bf16")
"""From the fewest bits to the most."""
SMALL = "w4g128"  # what shows how much a kind of product matters

Choice = Mapping[str, str]
"""product → precision"""


def kind_of(product: str) -> str:
    """`layers.*/down` of `layers.3/down`: products that differ in the number of their layer alone."""
    return re.sub(r"(?<=\.)\d+(?=/)", "*", product)


def uniform(products: Sequence[ProductLoss], precision: str) -> dict[str, str]:
    """As `--precision` makes it."""
    head = next((each.lm_head for each in FORMATS.values() if precision in each.precisions), precision)
    return {each.name: head if each.name == LM_HEAD else precision for each in products}


def only(products: Sequence[ProductLoss], kind: str) -> dict[str, str]:
    """A small precision in one kind of product, bf16 in all others."""
    return {each.name: SMALL if kind_of(each.name) == kind else "bf16" for each in products}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossModel:
    """factors: c by kind."""

    products: Sequence[ProductLoss]
    factors: Mapping[str, float]

    @classmethod
    def fit(cls, products: Sequence[ProductLoss], measured: Mapping[str, float]) -> "LossModel":
        """measured: kind → KL of `only`, less what bf16 costs."""
        errors: dict[str, float] = defaultdict(float)
        for each in products:
            errors[kind_of(each.name)] += each.losses[SMALL] - each.losses["bf16"]
        factors = {kind: max(kl, 1e-9) / max(errors[kind], 1e-12) for kind, kl in measured.items()}
        return cls(products=products, factors=factors)

    def loss(self, product: ProductLoss, precision: str) -> float:
        return self.factors[kind_of(product.name)] * product.losses[precision]

    def predicted(self, choice: Choice) -> float:
        """KL with float inputs."""
        return sum(self.loss(each, choice[each.name]) for each in self.products)

    def mixtures(self, count: int) -> list[dict[str, str]]:
        """`count` at most, whose sizes lie evenly between those of the smallest precision and of w8."""
        start = uniform(self.products, LADDER[0])
        low, high = self.nbytes(start), self.nbytes(uniform(self.products, "w8"))
        wanted = [low + (high - low) * i // (count + 1) for i in range(1, count + 1)]
        found: list[dict[str, str]] = []
        path, size = start, low
        for target in wanted:
            while (step := self._step(path)) is not None:
                name, precision, more = step
                if size + more > target:
                    break
                path, size = {**path, name: precision}, size + more
            if path not in (start, *found):
                found.append(path)
        return found

    def nbytes(self, choice: Choice) -> int:
        return sum(each.nbytes[choice[each.name]] for each in self.products)

    def _step(self, choice: Choice) -> tuple[str, str, int] | None:
        """(product, better precision, bytes that it adds): the one that lessens the loss most for its bytes."""
        best, most = None, 0.0
        for each in self.products:
            present = choice[each.name]
            for better in LADDER[LADDER.index(present) + 1 :]:
                gain = self.loss(each, present) - self.loss(each, better)
                more = each.nbytes[better] - each.nbytes[present]
                worth = gain / max(more, 1)
                if worth > most:
                    best, most = (each.name, better, more), worth
        return best


def recipe_of(choice: Choice, activations: str) -> Recipe:
    """What builds these precisions, with a rule for a whole kind of product where one is enough."""
    layers = {name: each for name, each in choice.items() if name != LM_HEAD}
    main = Counter(layers.values() or choice.values()).most_common(1)[0][0]
    kinds: dict[str, dict[str, str]] = defaultdict(dict)
    for name, each in layers.items():
        kinds[kind_of(name)][name] = each
    rules = []
    for kind, members in kinds.items():
        usual = Counter(members.values()).most_common(1)[0][0]
        if usual != main:
            rules.append(LayerRule(pattern=kind, precision=usual))
        rules += [LayerRule(pattern=name, precision=each) for name, each in members.items() if each != usual]
    quantised = any(each.startswith("w") for each in choice.values())
    return Recipe(
        precision=main,
        lm_head_precision=choice.get(LM_HEAD),
        activations=activations if quantised else None,
        layers=tuple(rules),
    )


def words(choice: Choice) -> str:
    """A choice in a few words: `w4g128`, or `w4g128 61 %, w8 39 % of the products`."""
    layers = [each for name, each in choice.items() if name != LM_HEAD] or list(choice.values())
    counts = Counter(layers)
    if len(counts) == 1:
        return layers[0]
    return ", ".join(f"{name} x {counts[name]}" for name in LADDER if name in counts)
