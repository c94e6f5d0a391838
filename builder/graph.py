"""The graph under rewriting: an onnx-graphsurgeon graph in canonical order, whose weights are never read.

A weight is an initialiser, or one of WEIGHT_OPS over weights. Everything else is an activation. Nodes are compared by
identity: onnx-graphsurgeon's own equality goes by names, and names mean nothing here.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_graphsurgeon.logger import G_LOGGER

from ingot.errors import CheckpointError, PassError

DOMAIN = "ingot"
WEIGHT_OPS = frozenset(
    {
        *("Cast", "Transpose", "Concat", "Slice", "Reshape", "Unsqueeze"),
        *("Add", "Mul", "Sub", "Div", "Gather", "DequantizeLinear", "MatMul"),
    }
)
_FOLD = "convert the model again; in a model.onnx of your own, fold shapes and bounds into constants"
SMALL = 4096  # inline constants up to this many elements are facts (shapes, axes, epsilons), not weights

Attr = int | float | str | list[int]

G_LOGGER.severity = G_LOGGER.CRITICAL + 1  # it warns about bf16, which is kept; errors are raised as well


class Graph:
    """One model. `ids` is its input [batch, sequence], `logits` its output [batch, sequence, vocab]."""

    def __init__(self, surgeon: gs.Graph) -> None:
        if len(surgeon.inputs) != 1 or len(surgeon.outputs) != 1:
            raise CheckpointError(
                "the ONNX graph is not that of a language model",
                expected="one input (token ids) and one output (logits)",
                got=f"{len(surgeon.inputs)} inputs and {len(surgeon.outputs)} outputs",
            )
        self.surgeon = surgeon
        self._prefix = "ingot."
        while any(name.startswith(self._prefix) for name in surgeon.tensors()):
            self._prefix += "."
        self._fresh = 0
        self._ages: dict[int, tuple[int, gs.Tensor]] = {}  # id → age; the tensor keeps its id from being used again

    @classmethod
    def load(cls, path: Path) -> "Graph":
        """Read a model.onnx without its external weights."""
        try:
            model = onnx.load(path, load_external_data=False)
            _check_damage(model.graph)
            return cls(gs.import_onnx(model))
        except (OSError, DecodeError, ValueError) as error:
            raise CheckpointError(
                "the graph of the checkpoint cannot be read",
                where=str(path),
                got=str(error),
                hint="make the checkpoint again with `ingot convert`",
            ) from error

    def save(self, path: Path) -> None:
        """Write the graph; weights stay where they are."""
        onnx.save(gs.export_onnx(self.surgeon, do_type_check=False), path)

    @property
    def ids(self) -> gs.Variable:
        return self.surgeon.inputs[0]

    @property
    def logits(self) -> gs.Variable:
        return self.surgeon.outputs[0]

    @logits.setter
    def logits(self, tensor: gs.Variable) -> None:
        self.surgeon.outputs[0] = tensor

    @property
    def nodes(self) -> list[gs.Node]:
        """The nodes that the logits need, in the order of a depth-first walk from them.

        The order depends on the structure alone, not on names or on the order in the file.
        """
        return list(_walk(self.logits))

    def sort(self) -> int:
        """Drop the nodes that the logits do not need and order the rest; returns how many went."""
        before, order = len(self.surgeon.nodes), self.nodes
        kept = {id(node) for node in order}
        for node in self.surgeon.nodes:
            if id(node) not in kept:
                node.inputs.clear()
                node.outputs.clear()
        self.surgeon.nodes = order
        self._ages = {id(each): (age, each) for age, node in enumerate(order) for each in node.outputs}
        return before - len(order)

    def age(self, tensor: gs.Tensor) -> int:
        """Place of a tensor in the execution order as of the last `sort`; -1 for inputs and weights."""
        return self._ages.get(id(tensor), (-1, tensor))[0]

    def plugins(self, op: str) -> list[gs.Node]:
        """Our nodes of one op, those of the running pass last, in the order in which it made them."""
        return [node for node in self.surgeon.nodes if node.op == op and ours(node, op) and node.outputs]

    def replace(
        self, old: gs.Variable, op: str, inputs: Sequence[gs.Tensor | None], attrs: Mapping[str, Attr]
    ) -> gs.Node:
        """Let a new node of our domain produce `old` instead of its producer, which goes where nobody else uses it."""
        former = producer(old)
        old.inputs.clear()
        node = self._new_node(op, DOMAIN, inputs, attrs, [old])
        if former is not None:
            self._drop(former)
        return node

    def insert(
        self,
        op: str,
        inputs: Sequence[gs.Tensor | None],
        attrs: Mapping[str, Attr],
        *,
        domain: str = DOMAIN,
        outputs: int = 1,
    ) -> list[gs.Variable]:
        """Add a node with new outputs, which are returned."""
        made = [gs.Variable(self._fresh_name()) for _ in range(outputs)]
        self._new_node(op, domain, inputs, attrs, made)
        return made

    def constant(self, values: npt.NDArray[np.generic]) -> gs.Constant:
        """A small inline constant."""
        return gs.Constant(self._fresh_name(), values)

    def redirect(self, old: gs.Variable, new: gs.Tensor) -> None:
        """Everyone who used `old` uses `new`."""
        former = producer(old)
        for node in list(old.outputs):
            for index, tensor in enumerate(node.inputs):
                if tensor is old:
                    node.inputs[index] = new
        if self.logits is old:
            self.logits = new
        if former is not None:
            self._drop(former)

    def move_output(self, tensor: gs.Variable, node: gs.Node) -> None:
        """Let `node` produce `tensor` as its next output, instead of its former producer."""
        former = producer(tensor)
        tensor.inputs.clear()
        node.outputs.append(tensor)
        if former is not None:
            self._drop(former)

    def set_input(self, node: gs.Node, index: int, tensor: gs.Tensor) -> None:
        """Give `node` another input and drop what thereby became unused."""
        former = producer(node.inputs[index])
        node.inputs[index] = tensor
        if former is not None:
            self._drop(former)

    def users(self, tensor: gs.Tensor) -> int:
        """How many node inputs (and the graph's output) read `tensor`."""
        return sum(sum(used is tensor for used in node.inputs) for node in _distinct(tensor.outputs)) + (
            tensor is self.logits
        )

    def _new_node(
        self,
        op: str,
        domain: str,
        inputs: Sequence[gs.Tensor | None],
        attrs: Mapping[str, Attr],
        outputs: list[gs.Variable],
    ) -> gs.Node:
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        node = gs.Node(
            op=op,
            name=self._fresh_name(),
            domain=domain,
            attrs=dict(attrs),
            outputs=outputs,
            inputs=[gs.Variable.empty() if tensor is None else tensor for tensor in given],
        )
        self.surgeon.nodes.append(node)
        return node

    def _fresh_name(self) -> str:
        self._fresh += 1
        return f"{self._prefix}{self._fresh}"

    def _drop(self, node: gs.Node) -> None:
        """Unlink a node that nobody uses, and then its producers; `sort` removes it from the list."""
        pending = [node]
        while pending:
            node = pending.pop()
            if any(self.users(tensor) for tensor in node.outputs):
                continue
            above = [made_by for tensor in node.inputs if (made_by := producer(tensor)) is not None]
            node.inputs.clear()
            node.outputs.clear()
            pending.extend(above)


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """The node that computes a tensor, None for inputs and initialisers."""
    return tensor.inputs[0] if tensor.inputs else None


def is_op(node: gs.Node | None, op: str, domain: str = "") -> TypeGuard[gs.Node]:
    """Whether `node` is an `op` of the given domain ("" is ONNX's own)."""
    return node is not None and node.op == op and _domain(node) == domain


def ours(node: gs.Node | None, *ops: str) -> bool:
    """Whether `node` is one of our plugins."""
    return node is not None and node.op in ops and _domain(node) == DOMAIN


def optional_input(node: gs.Node, index: int) -> gs.Tensor | None:
    """Input `index`, None where it is absent."""
    if index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    return node.inputs[index]


def is_weight(tensor: gs.Tensor) -> bool:
    """Whether a tensor is known at build: an initialiser or an expression over initialisers."""
    if isinstance(tensor, gs.Constant):
        return True
    node = producer(tensor)
    return node is not None and node.op in WEIGHT_OPS and not _domain(node) and all(map(is_weight, node.inputs))


def small_value(tensor: gs.Tensor | None) -> npt.NDArray[np.generic] | None:
    """The value of an inline constant of a few elements; None for weights and activations."""
    if not isinstance(tensor, gs.Constant) or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    if int(np.prod(tensor.shape)) > SMALL or not isinstance(tensor.dtype, np.dtype):
        return None
    values: npt.NDArray[np.generic] = tensor.values
    return values


def small_ints(tensor: gs.Tensor | None) -> list[int] | None:
    """The value of an inline integer constant as a flat list."""
    value = small_value(tensor)
    return value.reshape(-1).tolist() if value is not None and value.dtype.kind == "i" else None


def scalar(tensor: gs.Tensor | None) -> float | None:
    """The value of an inline constant of one element."""
    value = small_value(tensor)
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def weight_shape(tensor: gs.Tensor) -> tuple[int, ...]:
    """Shape of a weight, from its expression."""
    if isinstance(tensor, gs.Constant):
        return tuple(int(size) for size in tensor.shape)
    node = tensor.inputs[0]
    shapes = [weight_shape(each) for each in node.inputs]
    if node.op in ("Cast", "DequantizeLinear"):
        return shapes[0]
    if node.op == "MatMul":
        return shapes[0][0], shapes[1][1]
    if node.op in ("Add", "Mul", "Sub", "Div"):
        return tuple(np.broadcast_shapes(*shapes))
    if node.op == "Gather":
        axis = node.attrs.get("axis", 0) % len(shapes[0])
        return (*shapes[0][:axis], *shapes[1], *shapes[0][axis + 1 :])
    if node.op == "Slice":
        begin, end, axis = slice_of(node)
        return (*shapes[0][:axis], end - begin, *shapes[0][axis + 1 :])
    if node.op == "Transpose":
        order = node.attrs.get("perm", list(range(len(shapes[0])))[::-1])
        return tuple(shapes[0][axis] for axis in order)
    if node.op == "Concat":
        axis = node.attrs["axis"] % len(shapes[0])
        return tuple(sum(s[axis] for s in shapes) if i == axis else size for i, size in enumerate(shapes[0]))
    return _reshaped(node, shapes[0])


def slice_of(node: gs.Node) -> tuple[int, int, int]:
    """(begin, end, axis) of a Slice of a weight along one axis. Raises PassError for one of another kind."""
    shape = weight_shape(node.inputs[0])
    begins, ends, axes = (small_ints(optional_input(node, index)) for index in (1, 2, 3))
    steps = [1] if optional_input(node, 4) is None else small_ints(optional_input(node, 4))
    if begins is None or ends is None or axes is None or len(axes) != 1 or steps != [1]:
        raise PassError(
            "the graph slices a weight in a way that ingot does not know",
            where=describe(node),
            expected="a Slice along one axis, with constant bounds and step 1",
            hint=_FOLD,
        )
    axis = axes[0] % len(shape)
    begin, end = (min(max(at + shape[axis] if at < 0 else at, 0), shape[axis]) for at in (begins[0], ends[0]))
    return begin, max(begin, end), axis


def _reshaped(node: gs.Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    numbers = small_ints(optional_input(node, 1))
    if numbers is None:
        raise PassError(
            f"the graph reshapes a weight by {node.op} with a shape that is not a constant",
            where=describe(node),
            expected="a constant second input",
            hint=_FOLD,
        )
    if node.op == "Unsqueeze":
        ndim = len(shape) + len(numbers)
        added = {axis % ndim for axis in numbers}
        left = iter(shape)
        return tuple(1 if axis in added else next(left) for axis in range(ndim))
    wanted = [shape[i] if size == 0 else size for i, size in enumerate(numbers)]
    total, known = int(np.prod(shape)), int(np.prod([size for size in wanted if size != -1]))
    return tuple(total // known if size == -1 else size for size in wanted)


def describe(node: gs.Node) -> str:
    """A node for an error message: its op and its name in the checkpoint."""
    return f"{_domain(node) or 'onnx'}::{node.op} {node.name!r}"


def _domain(node: gs.Node) -> str:
    domain = node.domain or ""
    return "" if domain == "ai.onnx" else str(domain)


def _distinct(nodes: Sequence[gs.Node]) -> list[gs.Node]:
    return list({id(node): node for node in nodes}.values())


def _check_damage(graph: onnx.GraphProto) -> None:
    """Raise ValueError for what a damaged file may hold and nothing after it expects."""
    names = [word for node in graph.node for word in (node.op_type, node.domain, *node.input, *node.output)]
    for tensor in graph.initializer:
        names.append(tensor.name)
        place = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location == onnx.TensorProto.EXTERNAL and "location" not in place:
            raise ValueError(f"the external data of {tensor.name!r} have no location")
        int(place.get("offset", "0"))
    for name in names:
        if not isinstance(name, str):  # so protobuf gives what is no UTF-8
            raise ValueError(f"the name {name!r} is not UTF-8")


def _walk(output: gs.Tensor) -> Iterator[gs.Node]:
    """Producers of `output`, each after the producers of its inputs, in the order of the inputs."""
    seen: set[int] = set()
    root = producer(output)
    stack: list[tuple[gs.Node, Iterator[gs.Tensor]]] = []
    if root is not None:
        seen.add(id(root))
        stack.append((root, iter(list(root.inputs))))
    while stack:
        node, inputs = stack[-1]
        for tensor in inputs:
            above = producer(tensor)
            if above is not None and id(above) not in seen:
                seen.add(id(above))
                stack.append((above, iter(list(above.inputs))))
                break
        else:
            stack.pop()
            yield node
