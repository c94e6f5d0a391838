"""A plain MLP → its nodes of the Graph."""

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

    def float32(self, name: str) -> str: ...

    def integers(self, name: str, value: int | Sequence[int]) -> str: ...

    def constant(self, name: str, value: np.ndarray | np.float32) -> str: ...


def mlp(g: Nodes, x: str, config: ModelConfig, path: str) -> str:
    """[batch, sequence, hidden]"""
    if not config.gated_mlp:
        return g.linear(g.activated(g.linear(x, f"{path}/up"), path), f"{path}/down")
    if config.fused_gate_up:
        gate, up = f"{path}/gate/split", f"{path}/up/split"
        inputs = [g.linear(x, f"{path}/gate_up"), g.integers("gate_up", [config.intermediate_size] * 2)]
        g.nodes.append(helper.make_node("Split", inputs, [gate, up], f"{path}/split", axis=-1))
    else:
        gate, up = g.linear(x, f"{path}/gate", scale=config.gate_scale), g.linear(x, f"{path}/up")
    return g.linear(g.node("Mul", [g.activated(gate, path), up], f"{path}/gated"), f"{path}/down")
