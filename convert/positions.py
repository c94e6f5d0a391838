"""Positions of the tokens → their nodes of the Graph."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto

from ingot.configs.model import ModelConfig, RopeConfig
from ingot.convert.rope import inverse_frequencies

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    nodes: list[onnx.NodeProto]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def token_positions(g: Nodes, max_positions: int) -> str:
    """int64 [batch, sequence]: 0, 1, 2, ...; for more tokens than positions the graph fails in `_first`."""
    shape = g.node("Shape", ["input_ids"], "positions/shape")
    length = g.node("Gather", [shape, g.integers("one", 1)], "positions/length", axis=0)
    bounds = [_first(g, length, max_positions), length, g.integers("one", 1)]
    counted = g.node("Range", bounds, "positions/range")
    last = g.integers("last_position", max_positions - 1)
    bounded = g.node("Min", [counted, last], "positions/min")
    row = g.node("Unsqueeze", [bounded, g.integers("axis_0", [0])], "positions/unsqueeze")
    return g.node("Expand", [row, shape], "positions/expand")


def _first(g: Nodes, length: str, max_positions: int) -> str:
    """0, the only element of a vector: more tokens ask for the next one, which is an error that names this node."""
    beyond = g.node("Greater", [length, g.integers("max_positions", max_positions)], "positions/beyond")
    index = g.node("Cast", [beyond], "positions/index", to=TensorProto.INT64)
    return g.node("Gather", [g.integers("axis_0", [0]), index], f"positions/at_most_{max_positions}_tokens", axis=0)


def rotary_angles(g: Nodes, rope: RopeConfig, positions: str, path: str) -> tuple[str, str]:
    """cos and sin, each [batch, sequence, rotary_dim / 2]"""
    frequencies = g.constant(f"{path}/inv_freq", inverse_frequencies(rope))
    numbers = g.node("Cast", [positions], f"{path}/cast", to=TensorProto.FLOAT)
    column = g.node("Unsqueeze", [numbers, g.integers("axis_last", [-1])], f"{path}/unsqueeze")
    angle = g.node("Mul", [column, frequencies], f"{path}/angle")
    cos, sin = g.node("Cos", [angle], f"{path}/cos"), g.node("Sin", [angle], f"{path}/sin")
    if rope.scale != 1:
        scale = g.constant(f"{path}/scale", np.float32(rope.scale))
        cos = g.node("Mul", [cos, scale], f"{path}/cos_scaled")
        sin = g.node("Mul", [sin, scale], f"{path}/sin_scaled")
    return cos, sin


def query_growth(g: Nodes, config: ModelConfig, positions: str) -> str:
    """What queries are multiplied by, [batch, 1, sequence, 1]; made once for all layers"""
    if any(node.name == "growth/column" for node in g.nodes):
        return "growth/column"
    values = {"every": config.growth_positions, "one": 1, "by": config.query_growth}
    every, one, by = (g.constant(f"const/growth_{name}", np.float32(value)) for name, value in values.items())
    counted = g.node("Div", [g.node("Cast", [positions], "growth/cast", to=TensorProto.FLOAT), every], "growth/div")
    whole = g.node("Add", [g.node("Floor", [counted], "growth/floor"), one], "growth/count")
    factor = g.node("Mul", [g.node("Log", [whole], "growth/log"), by], "growth/mul")
    factor = g.node("Add", [factor, one], "growth/factor")
    return g.node("Unsqueeze", [factor, g.integers("growth_axes", [1, 3])], "growth/column")
