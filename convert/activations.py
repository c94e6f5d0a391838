"""The functions between the two halves of an MLP: their names in config.json and their nodes, the only list of convert.

Names are those of `plugins/activations.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Protocol

from ingot.configs.read import Section
from ingot.errors import UnsupportedModelError

Attribute = int | float | str | list[int]


class Nodes(Protocol):
    """What writes nodes: takes and returns names of values."""

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Activation:
    """names: those of transformers; write: takes the name of x and a path, writes the nodes, returns their result."""

    names: tuple[str, ...]
    write: Callable[[Nodes, str, str], str]


def _silu(g: Nodes, x: str, path: str) -> str:
    return g.node("Mul", [x, g.node("Sigmoid", [x], f"{path}/sigmoid")], f"{path}/silu")


def _relu2(g: Nodes, x: str, path: str) -> str:
    kept = g.node("Relu", [x], f"{path}/relu")
    return g.node("Mul", [kept, kept], f"{path}/relu2")


_TABLE = MappingProxyType(
    {
        "silu": _Activation(("silu", "swish"), _silu),
        "gelu": _Activation(
            ("gelu", "gelu_python"), lambda g, x, path: g.node("Gelu", [x], f"{path}/gelu", approximate="none")
        ),
        "gelu_tanh": _Activation(
            ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"),
            lambda g, x, path: g.node("Gelu", [x], f"{path}/gelu", approximate="tanh"),
        ),
        "relu": _Activation(("relu",), lambda g, x, path: g.node("Relu", [x], f"{path}/relu")),
        "relu2": _Activation(("relu2",), _relu2),
    }
)
_BY_NAME = MappingProxyType({name: ours for ours, row in _TABLE.items() for name in row.names})


def read_activation(section: Section, key: str, default: str) -> str:
    """ingot's name of an activation function. Raises UnsupportedModelError for one that ingot does not have."""
    name = section.text(key, default)
    if name not in _BY_NAME:
        raise UnsupportedModelError(
            f"activation function {name!r} is not supported",
            where=section.place(key),
            expected=", ".join(_BY_NAME),
            got=name,
        )
    return _BY_NAME[name]


def activated(g: Nodes, x: str, activation: str, path: str) -> str:
    """Element by element, in the shape of x."""
    return _TABLE[activation].write(g, x, path)
