"""Which kernels compute the matmuls of a step, for few and for many rows, and into how many parts K is cut.

    layers.0/qkv    up to 8 rows product_8, up to 16 product_16, up to 64 product_wide_64 in 4 parts, ...

The Plan lists matmuls that are computed alike together; a session looks the number of rows up.
"""

import dataclasses
from collections.abc import Callable

from ingot.builder.passes.base import PassReport
from ingot.plan import Plan, Step
from ingot.plan_tiles import Tile, Tiling

NAME = "choose_tiles"


def choose_tiles(plan: Plan, tiles: Callable[[Plan, Step], tuple[Tile, ...]]) -> tuple[Plan, PassReport]:
    """fired: kernel calls that have tiles. tiles: of a step, if it has some."""
    alike: dict[tuple[Tile, ...], list[str]] = {}
    for step in plan.steps:
        if found := tiles(plan, step):
            alike.setdefault(found, []).append(step.name)
    tilings = tuple(Tiling(steps=tuple(names), tiles=found) for found, names in alike.items())
    fired = sum(len(names) for names in alike.values())
    return dataclasses.replace(plan, tilings=tilings), PassReport(name=NAME, fired=fired)
