"""What a target says of the kernels that compute its products: see `Tiling` of ingot.plan."""

from typing import Protocol, runtime_checkable

from ingot.plan import Plan, Step
from ingot.plugins.target import Target
from ingot.tiles import Tile


@runtime_checkable
class ChoosesTiles(Target, Protocol):
    """A target that has kernels of products for few and for many rows."""

    def tiles(self, plan: Plan, step: Step) -> tuple[Tile, ...]:
        """Which one computes each number of rows, up to the largest step; nothing for other steps than products."""
        ...
