"""A plain MLP → its nodes of the Graph."""

import statistics
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import onnx
from onnx import helper

from ingot.configs.model import ModelConfig

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    nodes: list[onnx.NodeProto]

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...

    def linear(self, x: str, path: str, *, scale: float = 1.0) -> str: ...

    def activated(self, x: str, path: str) -> str: ...

    def norm(self, x: str, path: str) -> str: ...

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def mlp(g: Nodes, x: str, config: ModelConfig, path: str, *, cut: float = 0.0) -> str:
    """[batch, sequence, hidden]. cut: share of the gates that are cut off"""
    if not config.gated_mlp:
        return _down(g, g.activated(g.linear(x, f"{path}/up"), path), config, path)
    if config.fused_gate_up:
        gate, up = f"{path}/gate/split", f"{path}/up/split"
        inputs = [g.linear(x, f"{path}/gate_up"), g.integers("gate_up", [config.intermediate_size] * 2)]
        g.nodes.append(helper.make_node("Split", inputs, [gate, up], f"{path}/split", axis=-1))
    else:
        gate, up = g.linear(x, f"{path}/gate", scale=config.gate_scale), g.linear(x, f"{path}/up")
    gate = _cut(g, gate, cut, f"{path}/gate/cut") if cut else gate
    return _down(g, g.node("Mul", [g.activated(gate, path), up], f"{path}/gated"), config, path)


def _down(g: Nodes, inner: str, config: ModelConfig, path: str) -> str:
    """inner: what the MLP has between its matrices, [batch, sequence, intermediate]"""
    inner = g.norm(inner, f"{path}/inner_norm") if config.inner_norms else inner
    return g.linear(inner, f"{path}/down")


def _cut(g: Nodes, x: str, share: float, path: str) -> str:
    """max(0, x - mean - n * standard deviation) of each row, with the n at which so large a share of a normal
    distribution lies below"""
    last, deviations = g.integers("axis_last", [-1]), statistics.NormalDist().inv_cdf(share)
    mean = g.node("ReduceMean", [x, last], f"{path}/mean", keepdims=1)
    apart = g.node("Sub", [x, mean], f"{path}/centred")
    squares = g.node("Mul", [apart, apart], f"{path}/squares")
    variance = g.node("ReduceMean", [squares, last], f"{path}/variance", keepdims=1)
    count = g.constant(f"const/deviations_{share!r}", np.float32(deviations))
    wide = g.node("Mul", [g.node("Sqrt", [variance], f"{path}/deviation"), count], f"{path}/wide")
    return g.node("Relu", [g.node("Sub", [x, g.node("Add", [mean, wide], f"{path}/bound")], f"{path}/above")], path)
