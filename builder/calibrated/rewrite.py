"""The Graph of a Checkpoint with some weights as codes and scales: in place of `Cast(W)`, what makes float32 of them.

    DequantizeLinear(codes, scale, Cast(zero), axis=1, block_size=group)                        codes that are levels
    Gather(table, Cast(codes)) -> Reshape -> Mul(Unsqueeze(scale)) -> Reshape                   levels of a table

as docs/checkpoint_format.md lists them. What comes before a folded product takes the inverse of its fold: the weights
of a norm; or the scales of another product's rows, and its bias.

    norm -> product                                                      q, k, v; gate and up
    product -> Mul(activation, .) -> product                             up -> down
    product -> heads -> Attention -> rows -> product                     v -> o; heads of queries share those of values
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.builder.calibrated.levels import Levels
from ingot.checkpoint import Checkpoint
from ingot.dtypes import DType
from ingot.tensor_file import StoredTensor

_NORMS = ("RMSNormalization", "LayerNormalization")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A weight of the Checkpoint that can be stored as codes.

    rows, columns  of its matrix, or of all matrices of its stack
    value          the float32 value that codes will make
    transposed         stored [in, out]: codes are of the transpose
    """

    name: str
    shape: tuple[int, ...]
    value: str
    transposed: bool

    @property
    def columns(self) -> int:
        return self.shape[0] if self.transposed else self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Vector:
    """offset: a number that the Graph adds to the stored ones."""

    name: str
    offset: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fold:
    """What takes the inverse of a fold of a product's columns.

    tied     int [columns]: the number of the factor that each column takes
    vectors  weights of a norm, biases: each is divided by the factors
    divided  the weight whose rows are divided; None: a norm takes it
    """

    tied: npt.NDArray[np.intp]
    vectors: tuple[Vector, ...]
    divided: str | None = None


class StoredGraph:
    """model.onnx under rewriting."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, graph = model, model.graph
        self.initializers = {each.name: each for each in graph.initializer}
        self._users: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self._users[name].append(node)
        self._producers = {name: node for node in graph.node for name in node.output}
        self._new: list[onnx.NodeProto] = []
        self._dropped: set[str] = set()  # values; only `finish` takes nodes away, since that copies all others

    def leaf(self, name: str) -> Leaf | None:
        """None for a weight that is used otherwise than by products, or whose rows cannot be packed."""
        proto = self.initializers.get(name)
        if proto is None or len(proto.dims) not in (2, 3):
            return None
        value, users = name, self._users[name]
        if len(users) == 1 and users[0].op_type == "Cast":
            value = users[0].output[0]
            users = self._users[value]
        kinds = {self._kind(node, value, len(proto.dims)) for node in users}
        leaf = Leaf(name=name, shape=tuple(proto.dims), value=value, transposed=kinds == {"transposed"})
        return leaf if kinds in ({"straight"}, {"transposed"}) and leaf.columns % 2 == 0 else None

    def fold_before(self, leaves: Sequence[Leaf]) -> Fold | None:
        """Who could take a fold of the products of these leaves; None where their input goes elsewhere too."""
        products = [node for leaf in leaves for node in self._products(leaf)]
        inputs = {node.input[0] for node in products}
        if len(inputs) != 1:
            return None
        (value,) = inputs
        node, columns = self._producers.get(value), leaves[0].columns
        if node is None or len(self._users[value]) != len(products):
            return None
        if node.op_type in _NORMS:
            vectors = [self._own_vector(each) for each in node.input[1:]]
            known = tuple(each for each in vectors if each is not None)
            return Fold(tied=np.arange(columns), vectors=known) if len(known) == len(vectors) else None
        if node.op_type == "Mul":
            found = (self._linear(each, columns, np.arange(columns)) for each in node.input)
            return next((each for each in found if each is not None), None)
        return self._heads(node, columns)

    def _heads(self, merged: onnx.NodeProto, columns: int) -> Fold | None:
        """The product that makes the values of an Attention whose heads are put side by side."""
        attention = self._chain(merged, ("Reshape", "Transpose", "Attention"), 0)
        if attention is None or len(attention.output) != 1:
            return None
        cut = self._chain(self._producers.get(attention.input[2]), ("Transpose", "Reshape"), 0)
        if cut is None or len(self._users[attention.input[2]]) != 1:
            return None
        shape = self.initializers.get(cut.input[1])
        if shape is None or shape.data_location == TensorProto.EXTERNAL:
            return None
        *_, heads, size = numpy_helper.to_array(shape).tolist()
        if columns % (heads * size):
            return None
        column, shared = np.arange(columns), columns // (heads * size)
        return self._linear(cut.input[0], heads * size, column // size // shared * size + column % size)

    def _chain(self, node: onnx.NodeProto | None, ops: Sequence[str], place: int) -> onnx.NodeProto | None:
        """The last of nodes that follow each other backwards, each with no other reader."""
        for i, op in enumerate(ops):
            if node is None or node.op_type != op:
                return None
            if i + 1 < len(ops):
                name = node.input[place]
                node = self._producers.get(name) if len(self._users[name]) == 1 else None
        return node

    def _linear(self, value: str, weight_rows: int, tied: npt.NDArray[np.intp]) -> Fold | None:
        """Where a value that nobody else reads is a product of a stored weight, with or without a bias."""
        node = self._producers.get(value)
        if node is None or len(self._users[value]) != 1:
            return None
        biases: tuple[Vector, ...] = ()
        if node.op_type == "Add":
            vectors = [name for name in map(self._vector, node.input) if name is not None]
            others = [name for name in node.input if self._vector(name) is None]
            if len(vectors) != 1 or len(self._users[others[0]]) != 1 or len(self._users[vectors[0]]) != 1:
                return None
            biases, node = (Vector(name=vectors[0]),), self._producers.get(others[0])
        if node is None or node.op_type != "MatMul":
            return None
        leaf = self.leaf(self._stored_name(node.input[1]))
        fits = leaf is not None and len(leaf.shape) == 2 and leaf.rows == weight_rows and self._products(leaf) == [node]
        return Fold(tied=tied, vectors=biases, divided=leaf.name) if leaf is not None and fits else None

    def _own_vector(self, value: str) -> Vector | None:
        """What a norm multiplies with or adds: a stored vector that nobody else reads, maybe with a number added."""
        if len(self._users[value]) != 1:
            return None
        node, offset = self._producers.get(value), 0.0
        if node is not None and node.op_type == "Add":
            numbers = [found for found in map(self._number, node.input) if found is not None]
            others = [each for each in node.input if self._number(each) is None]
            if len(numbers) != 1 or len(self._users[others[0]]) != 1:
                return None
            value, offset = others[0], numbers[0]
        name = self._vector(value)
        return Vector(name=name, offset=offset) if name is not None and len(self._users[name]) == 1 else None

    def _number(self, value: str) -> float | None:
        """A constant without dimensions."""
        proto = self.initializers.get(value)
        if proto is None or proto.dims or proto.data_location == TensorProto.EXTERNAL:
            return None
        return float(numpy_helper.to_array(proto))

    def _vector(self, value: str) -> str | None:
        """The initialiser of one axis that a value is, maybe cast."""
        name = self._stored_name(value)
        return name if name in self.initializers and len(self.initializers[name].dims) == 1 else None

    def _stored_name(self, value: str) -> str:
        """The initialiser behind casts and transposes."""
        while (node := self._producers.get(value)) is not None and node.op_type in ("Cast", "Transpose"):
            value = node.input[0]
        return value

    def replace(self, leaf: Leaf, levels: Levels, group: int, tensors: dict[str, StoredTensor]) -> None:
        """tensors: codes, scale and, where levels have them, zero."""
        codes, scale = tensors["codes"], tensors["scale"]
        weight_rows, columns = leaf.rows, leaf.columns
        kind = TensorProto.UINT4 if levels.lowest == 0 else TensorProto.INT4
        if levels.highest > 15:
            kind = TensorProto.FLOAT8E4M3FN if levels.floats else TensorProto.INT8
        self._external(codes, kind, (weight_rows, columns))
        self._external(scale, TensorProto.FLOAT, scale.shape)
        path = leaf.name
        if levels.table:
            made = self._by_table(levels, codes.name, scale.name, group, columns, path)
        else:
            inputs = [codes.name, scale.name]
            if levels.zeros:
                self._external(tensors["zero"], TensorProto.UINT8, scale.shape)
                inputs.append(self._node("Cast", [tensors["zero"].name], f"{path}/zero_cast", to=TensorProto.UINT4))
            made = self._node("DequantizeLinear", inputs, f"{path}/dequantise", axis=1, block_size=group)
        if len(leaf.shape) == 3:
            shape = self._constant(f"{path}/shape", np.array(leaf.shape, np.int64))
            made = self._node("Reshape", [made, shape], f"{path}/stack")
        if leaf.transposed:
            made = self._node("Transpose", [made], f"{path}/transposed", perm=[1, 0])
        self._drop(leaf)
        self._new[-1].output[0] = leaf.value

    def replace_vector(self, name: str, tensor: StoredTensor, fresh: str) -> None:
        """A norm's weights, or a bias, become others, of float32."""
        self._external(tensor, TensorProto.FLOAT, tensor.shape)
        for old in {name, *(user.output[0] for user in self._users[name] if user.op_type == "Cast")}:
            for node in self._users[old]:
                if node.op_type != "Cast":
                    node.input[:] = [fresh if each == old else each for each in node.input]

    def stored(self, checkpoint: Checkpoint) -> list[StoredTensor]:
        """The weights that the Graph points to. Raises CheckpointError for one that is not there."""
        found = []
        for each in self.initializers.values():
            if each.data_location != TensorProto.EXTERNAL:
                continue
            place = {entry.key: entry.value for entry in each.external_data}
            dtype = DType.from_onnx(each.data_type)
            assert dtype is not None, f"{each.name} is of a float model"
            location, offset = place["location"], int(place.get("offset", 0))
            found.append(
                checkpoint.external(each.name, location=location, offset=offset, dtype=dtype, shape=tuple(each.dims))
            )
        return found

    def move(self, tensor: StoredTensor) -> None:
        """The bits of an initialiser lie elsewhere now."""
        before = self.initializers[tensor.name]
        self._external(tensor, before.data_type, tuple(before.dims))

    def finish(self) -> onnx.ModelProto:
        """The model, without what is no longer used."""
        graph = self.model.graph
        nodes = [*self._new, *(node for node in graph.node if not self._dropped & set(node.output))]
        used = {name for node in nodes for name in node.input} | {each.name for each in graph.output}
        while True:
            kept = [node for node in nodes if any(name in used for name in node.output)]
            if len(kept) == len(nodes):
                break
            nodes = kept
            used = {name for node in nodes for name in node.input} | {each.name for each in graph.output}
        del graph.node[:]
        graph.node.extend(nodes)
        kept_values = [each for each in self.initializers.values() if each.name in used]
        del graph.initializer[:]
        graph.initializer.extend(kept_values)
        return self.model

    def _kind(self, node: onnx.NodeProto, value: str, rank: int) -> str:
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "Transpose" and list(attributes["perm"]) == [[1, 0], [0, 2, 1]][rank - 2]:
            users = self._users[node.output[0]]
            return "straight" if users and all(each.op_type == "MatMul" for each in users) else "other"
        return "transposed" if node.op_type == "MatMul" and node.input[1] == value and rank == 2 else "other"

    def _products(self, leaf: Leaf) -> list[onnx.NodeProto]:
        users = self._users[leaf.value]
        return users if leaf.transposed else [each for node in users for each in self._users[node.output[0]]]

    def _by_table(self, levels: Levels, codes: str, scale: str, group: int, columns: int, path: str) -> str:
        table = self._constant("quantised/levels", np.array(levels.table, np.float32))
        indices = self._node("Cast", [codes], f"{path}/indices", to=TensorProto.INT32)
        made = self._node("Gather", [table, indices], f"{path}/levels", axis=0)
        if group < columns:
            sizes = self._constant(
                f"quantised/groups_{columns}_{group}", np.array([0, columns // group, group], np.int64)
            )
            made = self._node("Reshape", [made, sizes], f"{path}/groups")
            axis = self._constant("quantised/last_axis", np.array([-1], np.int64))
            scale = self._node("Unsqueeze", [scale, axis], f"{path}/scale_by_group")
        made = self._node("Mul", [made, scale], f"{path}/scaled")
        if group < columns:
            sizes = self._constant(f"quantised/rows_{columns}", np.array([0, columns], np.int64))
            made = self._node("Reshape", [made, sizes], f"{path}/rows")
        return made

    def _node(self, op: str, inputs: Sequence[str], path: str, **attributes: Any) -> str:
        self._new.append(helper.make_node(op, list(inputs), [f"{path}/value"], name=path, **attributes))
        return f"{path}/value"

    def _constant(self, name: str, values: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> str:
        self.initializers.setdefault(name, numpy_helper.from_array(values, name))
        return name

    def _external(self, tensor: StoredTensor, kind: int, dims: Sequence[int]) -> None:
        proto = TensorProto(name=tensor.name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        place = {"location": tensor.file.name, "offset": str(tensor.offset), "length": str(tensor.nbytes)}
        for key, value in place.items():
            proto.external_data.add(key=key, value=value)
        self.initializers[tensor.name] = proto

    def _drop(self, leaf: Leaf) -> None:
        """The stored weight and its Cast; their value comes from elsewhere."""
        del self.initializers[leaf.name]
        self._dropped.add(leaf.value)
