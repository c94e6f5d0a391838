"""Positions of the tokens → their nodes of the Graph."""

from collections.abc import Sequence
from typing import Protocol

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...


def token_positions(g: Nodes, max_positions: int) -> str:
    """int64 [batch, sequence]: 0, 1, 2, ..., never beyond the model's last position."""
    shape = g.node("Shape", ["input_ids"], "positions/shape")
    length = g.node("Gather", [shape, g.integers("one", 1)], "positions/length", axis=0)
    bounds = [g.integers("zero", 0), length, g.integers("one", 1)]
    counted = g.node("Range", bounds, "positions/range")
    last = g.integers("last_position", max_positions - 1)
    bounded = g.node("Min", [counted, last], "positions/min")
    row = g.node("Unsqueeze", [bounded, g.integers("axis_0", [0])], "positions/unsqueeze")
    return g.node("Expand", [row, shape], "positions/expand")
