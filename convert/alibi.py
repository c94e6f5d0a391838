"""Attention whose scores fall with the distance (ALiBi, arXiv:2108.12409) → what is added to the scores, as a mask."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from onnx import TensorProto

from ingot.configs.model import AlibiConfig
from ingot.dtypes import DType, from_float32, to_float32

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def distances(self) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def slopes_of(heads: int) -> tuple[float, ...]:
    """The slope of each head: 2^(-8 / n), 2^(-16 / n), ... for a power of two n; between two of these the slopes
    of the smaller one, then every other one of the larger."""
    n = 1 << math.ceil(math.log2(heads))
    slopes = 0.5 ** (np.arange(1, n + 1, dtype=np.float32) * np.float32(8 / n))
    if n != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return tuple(map(float, slopes))


def bf16_slopes(heads: int) -> tuple[float, ...]:
    """The same rounded to bf16, as Falcon's."""
    return tuple(map(float, to_float32(from_float32(np.array(slopes_of(heads), np.float32), DType.BF16), DType.BF16)))


def alibi_mask(g: Nodes, alibi: AlibiConfig, scale: float) -> str:
    """float32 [heads, sequence, sequence]; scale: of the scores"""
    slopes = np.array(alibi.slopes, np.float32)[:, None, None]
    if not alibi.bf16:
        apart = g.node("Cast", [g.distances()], "alibi/distances", to=TensorProto.FLOAT)
        return g.node("Mul", [apart, g.constant("const/slopes", -slopes)], "alibi/mask")
    tokens = g.node("Unsqueeze", ["positions/range", g.integers("axis_0", [0])], "alibi/tokens")
    x = g.node("Mul", [_rounded(g, tokens, "tokens"), g.constant("const/slopes", slopes)], "alibi/product")
    x = g.node("Mul", [_rounded(g, x, "product"), g.constant("const/alibi_scale", np.float32(scale))], "alibi/scaled")
    length = g.node("Unsqueeze", ["positions/length", g.integers("axis_0", [0])], "alibi/length")
    shape = g.node("Concat", [g.integers("slopes_heads", [len(slopes)]), length, length], "alibi/shape", axis=0)
    return g.node("Expand", [x, shape], "alibi/mask")


def _rounded(g: Nodes, x: str, path: str) -> str:
    """To bf16, and back to float32"""
    narrow = g.node("Cast", [x], f"alibi/{path}/bf16", to=TensorProto.BFLOAT16)
    return g.node("Cast", [narrow], f"alibi/{path}/rounded", to=TensorProto.FLOAT)
