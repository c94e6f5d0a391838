"""A lowered network → TensorRT's network API, for the full TensorRT, whose builder takes plugins as objects.

It supports the ONNX ops that `lowering.OPS` lists, as far as lowering uses them: activations are [rows, columns]. What
TensorRT has no layer for becomes several: an RMS norm, the two halves of gate and up.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from ingot.errors import BuildError
from ingot.plugins.tensorrt.attention import PLUGIN, Attention
from ingot.plugins.tensorrt.builder_bindings import Dims, ILayer, INetworkDefinition, ITensor
from ingot.plugins.tensorrt.layers import NODE

MakePlugin = Callable[[Attention], Any]

_TYPES: Mapping[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
}
_REPORT = "build for a cuda or CPU target; report this as a bug, with TensorRT's lines above and `ingot doctor --all`"
_COLUMNS = 1 << 1  # of [rows, columns], as a mask of axes


def add_network(trt: Any, network: INetworkDefinition, model: onnx.ModelProto, make_plugin: MakePlugin) -> None:
    """Fill an empty network. make_plugin: an IPluginV3 of an attention.

    Raises BuildError for an op that it does not know, and for a layer that the library refuses.
    """
    _Adding(trt, network, model, make_plugin).run()


class _Adding:
    def __init__(self, trt: Any, network: INetworkDefinition, model: onnx.ModelProto, make_plugin: MakePlugin) -> None:
        self._trt, self._network, self._model, self._make_plugin = trt, network, model, make_plugin
        self._tensors: dict[str, ITensor] = {}
        self._kept: list[npt.NDArray[np.generic]] = []  # the library reads constants when it builds
        self._node = ""
        self._layers = Counter[str]()  # of each node

    def run(self) -> None:
        graph = self._model.graph
        for value in graph.input:
            self._tensors[value.name] = self._input(value)
        for constant in graph.initializer:
            self._node = constant.name
            self._tensors[constant.name] = self._constant(numpy_helper.to_array(constant))
        for node in graph.node:
            add = _NODES.get(node.op_type)
            if add is None:
                raise BuildError(
                    "the network API has no layer for an op of the network",
                    where=node.name,
                    got=node.op_type,
                    hint="build for a CPU or cuda target, or report this as a bug of ingot",
                )
            self._node = node.name
            for name, tensor in zip(node.output, add(self, node), strict=True):
                tensor.name = name
                self._tensors[name] = tensor
        for value in graph.output:
            self._network.mark_output(self._tensors[value.name])

    # One method per op; each returns the tensors of the node's outputs.

    def gather(self, node: onnx.NodeProto) -> list[ITensor]:
        x, indices = self._given(node)
        return [self._made(self._network.add_gather(x, indices, 0))]

    def cast(self, node: onnx.NodeProto) -> list[ITensor]:
        (x,) = self._given(node)
        return [self._made(self._network.add_cast(x, self._type(int(_attributes(node)["to"]))))]

    def activation(self, node: onnx.NodeProto) -> list[ITensor]:
        (x,) = self._given(node)
        kind = node.op_type.upper()
        if kind == "GELU":
            kind = "GELU_TANH" if _attributes(node)["approximate"] == b"tanh" else "GELU_ERF"
        return [self._made(self._network.add_activation(x, getattr(self._trt.ActivationType, kind)))]

    def elementwise(self, node: onnx.NodeProto) -> list[ITensor]:
        one, other = self._given(node)
        return [self._pair(one, other, {"Add": "SUM", "Mul": "PROD", "Div": "DIV"}[node.op_type])]

    def split(self, node: onnx.NodeProto) -> list[ITensor]:
        """Two halves of the columns, of as many rows as there are."""
        (x,) = self._given(node)
        half = x.shape[1] // 2
        rows = self._made(self._network.add_slice(self._made(self._network.add_shape(x)), (0,), (1,), (1,)))
        size = self._joined([rows, self._constant(np.array([half], np.int64))], 0)
        return [self._half(x, begin, size) for begin in (0, half)]

    def layer_norm(self, node: onnx.NodeProto) -> list[ITensor]:
        x, scale, *bias = self._given(node)
        columns = scale.shape[0]
        shift = bias[0] if bias else self._constant(np.zeros(columns, np.float32))
        layer = self._network.add_normalization_v2(x, self._wide(scale, 2), self._wide(shift, 2), _COLUMNS)
        if layer is not None:
            layer.epsilon = float(_attributes(node)["epsilon"])
        return [self._made(layer)]

    def rms_norm(self, node: onnx.NodeProto) -> list[ITensor]:
        """x / sqrt(mean of squares + epsilon) * scale, in float32."""
        x, scale = self._given(node)
        squares = self._pair(x, x, "PROD")
        mean = self._made(self._network.add_reduce(squares, self._trt.ReduceOperation.AVG, _COLUMNS, keep_dims=True))
        epsilon = self._constant(np.asarray(_attributes(node)["epsilon"], np.float32))
        root = self._network.add_unary(self._pair(mean, epsilon, "SUM"), self._trt.UnaryOperation.SQRT)
        return [self._pair(self._pair(x, self._made(root), "DIV"), scale, "PROD")]

    def identity(self, node: onnx.NodeProto) -> list[ITensor]:
        (x,) = self._given(node)
        return [self._made(self._network.add_identity(x))]

    def gemm(self, node: onnx.NodeProto) -> list[ITensor]:
        x, weight = self._given(node)
        kinds = self._trt.MatrixOperation
        return [self._made(self._network.add_matrix_multiply(x, kinds.NONE, weight, kinds.TRANSPOSE))]

    def attention(self, node: onnx.NodeProto) -> list[ITensor]:
        plugin = self._make_plugin(Attention(**_attributes(node)))
        layer = self._network.add_plugin_v3(self._given(node), [], plugin)
        self._made(layer)
        assert layer is not None, "made asks for it"
        return [layer.get_output(index) for index in range(len(node.output))]

    # Parts of several ops.

    def _input(self, value: onnx.ValueInfoProto) -> ITensor:
        lengths = value.type.tensor_type.shape.dim
        shape = tuple(-1 if each.dim_param else int(each.dim_value) for each in lengths)
        made = self._network.add_input(value.name, self._type(value.type.tensor_type.elem_type), shape)
        if made is None:
            raise BuildError(
                "TensorRT does not accept an input of the network", where=value.name, got=str(shape), hint=_REPORT
            )
        for index, each in enumerate(lengths):
            if each.dim_param:
                made.set_dimension_name(index, each.dim_param)  # equal names are equal lengths
        return made

    def _given(self, node: onnx.NodeProto) -> list[ITensor]:
        return [self._tensors[name] for name in node.input]

    def _type(self, kind: int) -> Any:
        return getattr(self._trt, _TYPES[kind])

    def _constant(self, value: npt.NDArray[np.generic]) -> ITensor:
        self._kept.append(np.ascontiguousarray(value))
        return self._made(self._network.add_constant(value.shape, self._trt.Weights(self._kept[-1])))

    def _pair(self, one: ITensor, other: ITensor, op: str) -> ITensor:
        ndim = max(len(one.shape), len(other.shape))
        kind = getattr(self._trt.ElementWiseOperation, op)
        return self._made(self._network.add_elementwise(self._wide(one, ndim), self._wide(other, ndim), kind))

    def _wide(self, x: ITensor, ndim: int) -> ITensor:
        """With ones in front: TensorRT broadcasts lengths, not ranks. What is too narrow has fixed lengths."""
        missing = ndim - len(x.shape)
        return self._shaped(x, (*([1] * missing), *x.shape)) if missing else x

    def _shaped(self, x: ITensor, shape: Dims) -> ITensor:
        layer = self._network.add_shuffle(x)
        if layer is not None:
            layer.reshape_dims = shape
        return self._made(layer)

    def _joined(self, parts: Sequence[ITensor], axis: int) -> ITensor:
        layer = self._network.add_concatenation(parts)
        if layer is not None:
            layer.axis = axis
        return self._made(layer)

    def _half(self, x: ITensor, begin: int, size: ITensor) -> ITensor:
        layer = self._network.add_slice(x, (0, begin), (0, 0), (1, 1))
        if layer is not None:
            layer.set_input(2, size)
        return self._made(layer)

    def _made(self, layer: ILayer | None) -> ITensor:
        """The first output of a layer, which gets the node's name and a number; whatever layers it is fused into name
        the node."""
        if layer is None:
            raise BuildError("TensorRT does not accept a layer of the network", where=self._node, hint=_REPORT)
        self._layers[self._node] += 1
        layer.name = f"{self._node}#{self._layers[self._node]}"
        layer.metadata = NODE.format(self._node)
        return layer.get_output(0)


_NODES: Mapping[str, Callable[[_Adding, onnx.NodeProto], list[ITensor]]] = {
    "Add": _Adding.elementwise,
    "Cast": _Adding.cast,
    "Div": _Adding.elementwise,
    "Gather": _Adding.gather,
    "Gelu": _Adding.activation,
    "Gemm": _Adding.gemm,
    "Identity": _Adding.identity,
    "LayerNormalization": _Adding.layer_norm,
    "Mul": _Adding.elementwise,
    "RMSNormalization": _Adding.rms_norm,
    "Relu": _Adding.activation,
    "Sigmoid": _Adding.activation,
    "Split": _Adding.split,
    "Tanh": _Adding.activation,
    PLUGIN: _Adding.attention,
}


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}
