"""The Graph of a Checkpoint with some weights as codes and scales: in place of `Cast(W)`, what makes float32 of them.

    DequantizeLinear(codes, scale, Cast(zero), axis=1, block_size=group)                        codes that are levels
    Gather(table, Cast(codes)) -> Reshape -> Mul(Unsqueeze(scale)) -> Reshape                   levels of a table

as docs/checkpoint_format.md lists them. The norm before a folded product gets other weights.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
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

    def norm_before(self, leaves: Sequence[Leaf]) -> list[str] | None:
        """Weights of the norm whose output goes into the products of these leaves and nowhere else."""
        products = [node for leaf in leaves for node in self._products(leaf)]
        inputs = {node.input[0] for node in products}
        if len(inputs) != 1:
            return None
        (normed,) = inputs
        norm = self._producers.get(normed)
        if norm is None or norm.op_type not in _NORMS or len(self._users[normed]) != len(products):
            return None
        weights = list(norm.input[1:])
        return weights if all(len(self._users[each]) == 1 for each in weights) else None

    def replace(self, leaf: Leaf, levels: Levels, group: int, tensors: dict[str, StoredTensor]) -> None:
        """tensors: codes, scale and, where levels have them, zero."""
        codes, scale = tensors["codes"], tensors["scale"]
        rows, columns = leaf.rows, leaf.columns
        kind = TensorProto.UINT4 if levels.lowest == 0 else TensorProto.INT4
        whole = levels.highest > 15
        self._external(codes, TensorProto.INT8 if whole else kind, (rows, columns))
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
        """A norm's weights become others, of float32."""
        self._external(tensor, TensorProto.FLOAT, tensor.shape)
        for node in self._users[name]:
            if node.op_type in _NORMS:
                for i, each in enumerate(node.input):
                    if each == name:
                        node.input[i] = fresh

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
