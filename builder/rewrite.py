"""Matches patterns against the graph: a small language of nodes, weights and named holes.

    Op("Mul", X("gate"), Op("Sigmoid", X("gate")))        a name that occurs twice must be the same tensor

Matching starts at a node and goes towards the inputs. Add and Mul match in both orders. A pattern may list fewer
inputs than a node has: what the others mean is for `check` to say.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import onnx_graphsurgeon as gs

from ingot.builder.graph import is_op, is_weight, producer, scalar

_COMMUTATIVE = frozenset({"Add", "Mul"})


@dataclasses.dataclass(frozen=True)
class X:
    """Any activation."""

    name: str


@dataclasses.dataclass(frozen=True)
class W:
    """A weight."""

    name: str


@dataclasses.dataclass(frozen=True)
class Number:
    """An inline constant of one element; `value` if given must be it, within float32's precision."""

    name: str = ""
    value: float | None = None


class Op:
    """A node and its inputs. `name` makes the node available to check and rewrite."""

    def __init__(self, op: str, *inputs: "Pattern", name: str = "", domain: str = "") -> None:
        self.op, self.inputs, self.name, self.domain = op, inputs, name, domain


class Either:
    """One of several patterns, tried in order."""

    def __init__(self, *options: "Pattern") -> None:
        self.options = options


Pattern = X | W | Number | Op | Either
Bindings = Mapping[str, "gs.Tensor | gs.Node"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """What a pattern matched: `root` is the node where it started."""

    root: gs.Node
    bindings: Bindings

    def __getitem__(self, name: str) -> "gs.Tensor | gs.Node":
        return self.bindings[name]

    @property
    def output(self) -> gs.Variable:
        """The tensor that a rewrite replaces."""
        return self.root.outputs[0]


def match(pattern: Op, node: gs.Node) -> Match | None:
    """The first way in which `pattern` fits with `node` as its root."""
    for bindings in _fit_node(pattern, node, {}):
        return Match(root=node, bindings=bindings)
    return None


def _fit_node(pattern: Op, node: gs.Node, bindings: Bindings) -> Iterator[Bindings]:
    if not is_op(node, pattern.op, pattern.domain) or len(node.inputs) < len(pattern.inputs):
        return
    if pattern.name:
        bindings = {**bindings, pattern.name: node}
    orders: Iterator[Sequence[Pattern]] = iter([pattern.inputs])
    if pattern.op in _COMMUTATIVE and not pattern.domain:
        orders = permutations(pattern.inputs)
    for order in orders:
        yield from _fit_all(order, node.inputs, bindings)


def _fit_all(patterns: Sequence[Pattern], tensors: Sequence[gs.Tensor], bindings: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bindings
        return
    for bound in _fit(patterns[0], tensors[0], bindings):
        yield from _fit_all(patterns[1:], tensors[1:], bound)


def _fit(pattern: Pattern, tensor: gs.Tensor, bindings: Bindings) -> Iterator[Bindings]:
    if isinstance(pattern, Either):
        for option in pattern.options:
            yield from _fit(option, tensor, bindings)
    elif isinstance(pattern, Op):
        node = producer(tensor)
        if node is not None and node.outputs[0] is tensor:
            yield from _fit_node(pattern, node, bindings)
    elif not tensor.is_empty() and _is_kind(pattern, tensor):
        bound = bindings.get(pattern.name)
        if not pattern.name or bound is None:
            yield {**bindings, pattern.name: tensor}
        elif bound is tensor:
            yield bindings


def _is_kind(pattern: X | W | Number, tensor: gs.Tensor) -> bool:
    if isinstance(pattern, X):
        return not is_weight(tensor)
    if isinstance(pattern, W):
        return is_weight(tensor)
    value = scalar(tensor)
    if value is None or pattern.value is None:
        return value is not None
    return abs(value - pattern.value) <= 1e-6 * abs(pattern.value)
