"""Attention with a sink for each head → one more key and value of zeros, whose score is the sink: it takes part in the
softmax and adds nothing. The mask says what a token sees, and has the sinks as its last column.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ingot.configs.model import ModelConfig

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def float32(self, name: str) -> str: ...

    def window_mask(self, window: int) -> str: ...

    def distances(self) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def with_sinks(g: Nodes, key: str, value: str, config: ModelConfig, window: int, path: str) -> tuple[str, str, str]:
    """(keys and values [batch, kv_heads, sequence + 1, head_dim], mask [1, heads, sequence, sequence + 1])"""
    batch = g.node("Gather", ["positions/shape", g.integers("first", [0])], f"{path}/sink/batch", axis=0)
    rest = g.integers("sink_shape", [config.kv_heads, 1, config.head_dim])
    shape = g.node("Concat", [batch, rest], f"{path}/sink/shape", axis=0)
    zeros = g.node("ConstantOfShape", [shape], f"{path}/sink/zeros")
    key, value = (
        g.node("Concat", [each, zeros], f"{path}/{name}/with_sink", axis=2) for each, name in ((key, "k"), (value, "v"))
    )
    column = g.node(
        "Reshape",
        [g.float32(f"{path}/sinks/weight"), g.integers("sinks", [1, config.heads, 1, 1])],
        f"{path}/sink/column",
    )
    length = g.node("Unsqueeze", ["positions/length", g.integers("axis_0", [0])], f"{path}/sink/length")
    one = g.integers("ones_2", [1, 1])
    column_shape = g.node("Concat", [one, length, g.integers("ones_1", [1])], f"{path}/sink/column_shape", axis=0)
    sinks = g.node("Expand", [column, column_shape], f"{path}/sink/scores")
    seen = g.node(
        "Expand", [_seen(g, window, path), g.integers("of_heads", [1, config.heads, 1, 1])], f"{path}/sink/seen"
    )
    return key, value, g.node("Concat", [seen, sinks], f"{path}/sink/mask", axis=3)


def _seen(g: Nodes, window: int, path: str) -> str:
    """[sequence, sequence]: 0 where a token (row) sees another (column), else minus infinity"""
    seen = g.node("GreaterOrEqual", [g.distances(), g.integers("zero", 0)], f"{path}/sink/causal")
    if window:
        seen = g.node("And", [seen, g.window_mask(window)], f"{path}/sink/near")
    numbers = [g.constant("const/seen", np.float32(0)), g.constant("const/never", np.float32(-np.inf))]
    return g.node("Where", [seen, *numbers], f"{path}/sink/allowed")
