"""The function between the two halves of an MLP → its nodes."""

from collections.abc import Sequence
from typing import Protocol

from ingot.configs.model import Activation

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...


def activated(g: Nodes, x: str, activation: Activation, path: str) -> str:
    """Element by element, in the shape of x."""
    match activation:
        case Activation.SILU:
            return g.node("Mul", [x, g.node("Sigmoid", [x], f"{path}/sigmoid")], f"{path}/silu")
        case Activation.GELU:
            return g.node("Gelu", [x], f"{path}/gelu", approximate="none")
        case Activation.GELU_TANH:
            return g.node("Gelu", [x], f"{path}/gelu", approximate="tanh")
        case Activation.RELU:
            return g.node("Relu", [x], f"{path}/relu")
        case Activation.RELU2:
            kept = g.node("Relu", [x], f"{path}/relu")
            return g.node("Mul", [kept, kept], f"{path}/relu2")
