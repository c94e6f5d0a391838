"""What a graph file holds, for people: its ops, its input and output, its weights by type. Nothing is loaded."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from ingot.builder.graph import Graph


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraphSummary:
    """ops: "domain::op" → count; weights: ONNX type → bytes, of external initialisers; files: that hold them."""

    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: dict[str, int]
    weights: dict[str, int]
    initializers: int
    files: tuple[str, ...]


def summarise(path: Path) -> GraphSummary:
    """Raises CheckpointError if the file is not a graph of a language model."""
    graph = Graph.load(path).surgeon
    ops = Counter(f"{node.domain}::{node.op}" if node.domain else str(node.op) for node in graph.nodes)
    weights: Counter[str] = Counter()
    files: set[str] = set()
    constants = [tensor for tensor in graph.tensors().values() if isinstance(tensor, gs.Constant)]
    for tensor in constants:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            proto = tensor._values.tensor  # public `.values` would read the file
            place = {entry.key: entry.value for entry in proto.external_data}
            files.add(place["location"])
            itemsize = onnx.helper.tensor_dtype_to_np_dtype(proto.data_type).itemsize
            weights[onnx.TensorProto.DataType.Name(proto.data_type)] += int(np.prod(proto.dims)) * itemsize
    return GraphSummary(
        opset=graph.opset,
        inputs=tuple(map(_described, graph.inputs)),
        outputs=tuple(map(_described, graph.outputs)),
        ops=dict(sorted(ops.items())),
        weights=dict(sorted(weights.items())),
        initializers=len(constants),
        files=tuple(sorted(files)),
    )


def _described(tensor: gs.Tensor) -> str:
    sizes = ", ".join(str(size) for size in tensor.shape or [])
    return f"{tensor.name} {tensor.dtype} [{sizes}]"
