"""What a target says of its kernels for few and for many rows."""

from typing import Protocol, runtime_checkable

from ingot.plan import CacheGroup, Plan, Step
from ingot.plan_tiles import Tile
from ingot.plugins.target import Target


@runtime_checkable
class ChoosesTiles(Target, Protocol):
    """A target that launches other kernels of a product for other numbers of rows: see `Tiling` of ingot.plan_tiles."""

    def tiles(self, plan: Plan, step: Step) -> tuple[Tile, ...]:
        """Which one computes each number of rows, up to the largest step; nothing for other steps than products."""
        ...


@runtime_checkable
class HasPromptKernels(Target, Protocol):
    """A target that may have kernels of attention which are faster for prompts."""

    def prompt_kernel(self, kernel: str, group: CacheGroup) -> str | None:
        """In place of another one, over such a cache; None where there is none."""
        ...
