"""TensorRT's network API in numpy: a layer is computed when it is added. Strict where the library is: types must agree,
ranks too, and a reshaped or broadcast length must fit."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]
Attend = Callable[[Any, Sequence[Array]], tuple[Array, ...]]


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)), x.dtype)


def _gelu_tanh(x: Array) -> Array:
    z = x.astype(np.float64)
    return np.asarray(z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))), x.dtype)


def _gelu_erf(x: Array) -> Array:
    z = x.astype(np.float64)
    return np.asarray(z / 2 * (1 + np.vectorize(math.erf)(z / np.sqrt(2))), x.dtype)


class NumpyTensor:
    """ITensor."""

    def __init__(self, value: Array, name: str = "") -> None:
        self.value, self.name = value, name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def set_dimension_name(self, index: int, name: str) -> None:
        assert 0 <= index < self.value.ndim
        assert name


class NumpyLayer:
    """ILayer and its kinds: computed once its settings are known, when an output is asked for."""

    def __init__(
        self, kind: str, reads: Sequence[NumpyTensor], compute: Callable[["NumpyLayer"], Sequence[Array]]
    ) -> None:
        self._compute, self.outputs = compute, list[NumpyTensor]()
        self.kind, self.reads = kind, reads
        self.name, self.metadata, self.axis, self.epsilon = "", "", 0, 0.0
        self.reshape_dims: tuple[int, ...] = ()
        self.inputs: dict[int, NumpyTensor] = {}

    def set_input(self, index: int, tensor: NumpyTensor) -> None:
        assert not self.outputs, "set before the outputs are used"
        self.inputs[index] = tensor

    def get_output(self, index: int) -> NumpyTensor:
        """Layers keep no settings that come after."""
        if not self.outputs:
            self.outputs = [NumpyTensor(np.asarray(value)) for value in self._compute(self)]
        return self.outputs[index]


class NumpyNetwork:
    """INetworkDefinition. given: the network's inputs; attend: computes a plugin."""

    def __init__(self, given: Mapping[str, Array], attend: Attend) -> None:
        self._given, self._attend = given, attend
        self.outputs: dict[str, Array] = {}
        self.layers: list[NumpyLayer] = []

    @property
    def kinds(self) -> list[str]:
        return [layer.kind for layer in self.layers]

    def _layer(
        self, kind: str, reads: Sequence[NumpyTensor], compute: Callable[[NumpyLayer], Sequence[Array]]
    ) -> NumpyLayer:
        self.layers.append(NumpyLayer(kind, reads, compute))
        return self.layers[-1]

    def add_input(self, name: str, dtype: Any, shape: tuple[int, ...]) -> NumpyTensor:
        value = self._given[name]
        assert value.dtype == dtype, name
        assert all(wanted in (-1, found) for wanted, found in zip(shape, value.shape, strict=True)), name
        return NumpyTensor(value, name)

    def mark_output(self, tensor: NumpyTensor) -> None:
        self.outputs[tensor.name] = tensor.value

    def add_constant(self, shape: tuple[int, ...], weights: Array) -> NumpyLayer:
        return self._layer("CONSTANT", (), lambda layer: [weights.reshape(shape)])

    def add_cast(self, input: NumpyTensor, to_type: Any) -> NumpyLayer:
        return self._layer("CAST", (input,), lambda layer: [input.value.astype(to_type)])

    def add_identity(self, input: NumpyTensor) -> NumpyLayer:
        return self._layer("IDENTITY", (input,), lambda layer: [input.value])

    def add_shape(self, input: NumpyTensor) -> NumpyLayer:
        return self._layer("SHAPE", (input,), lambda layer: [np.array(input.shape, np.int64)])

    def add_shuffle(self, input: NumpyTensor) -> NumpyLayer:
        """0 in a new shape is the old length there."""

        def compute(layer: NumpyLayer) -> list[Array]:
            shape = [input.shape[index] if each == 0 else each for index, each in enumerate(layer.reshape_dims)]
            return [input.value.reshape(shape)]

        return self._layer("SHUFFLE", (input,), compute)

    def add_slice(
        self, input: NumpyTensor, start: tuple[int, ...], shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> NumpyLayer:
        def compute(layer: NumpyLayer) -> list[Array]:
            size = layer.inputs[2].value.tolist() if 2 in layer.inputs else shape
            ends = [begin + each * step for begin, each, step in zip(start, size, stride, strict=True)]
            assert all(end <= length for end, length in zip(ends, input.shape, strict=True))
            return [input.value[tuple(slice(begin, end) for begin, end in zip(start, ends, strict=True))]]

        return self._layer("SLICE", (input,), compute)

    def add_concatenation(self, inputs: Sequence[NumpyTensor]) -> NumpyLayer:
        assert len({each.value.dtype for each in inputs}) == 1
        return self._layer(
            "CONCATENATION", inputs, lambda layer: [np.concatenate([each.value for each in inputs], axis=layer.axis)]
        )

    def add_gather(self, input: NumpyTensor, indices: NumpyTensor, axis: int) -> NumpyLayer:
        assert indices.value.dtype == np.int32
        return self._layer("GATHER", (input, indices), lambda layer: [np.take(input.value, indices.value, axis=axis)])

    def add_unary(self, input: NumpyTensor, op: Callable[[Array], Array]) -> NumpyLayer:
        return self._layer("UNARY", (input,), lambda layer: [op(input.value)])

    def add_activation(self, input: NumpyTensor, type: Callable[[Array], Array]) -> NumpyLayer:
        return self._layer("ACTIVATION", (input,), lambda layer: [type(input.value)])

    def add_elementwise(
        self, input1: NumpyTensor, input2: NumpyTensor, op: Callable[[Array, Array], Array]
    ) -> NumpyLayer:
        assert len(input1.shape) == len(input2.shape), "lengths are broadcast, ranks are not"
        assert input1.value.dtype == input2.value.dtype
        return self._layer("ELEMENTWISE", (input1, input2), lambda layer: [op(input1.value, input2.value)])

    def add_reduce(self, input: NumpyTensor, op: Any, axes: int, keep_dims: bool) -> NumpyLayer:
        chosen = tuple(axis for axis in range(len(input.shape)) if axes >> axis & 1)
        return self._layer("REDUCE", (input,), lambda layer: [op(input.value, axis=chosen, keepdims=keep_dims)])

    def add_normalization_v2(
        self,
        input: NumpyTensor,
        scale: NumpyTensor,
        bias: NumpyTensor,
        axesMask: int,  # noqa: N803
    ) -> NumpyLayer:
        assert scale.shape == bias.shape == (1, input.shape[1])
        assert axesMask == 2

        def compute(layer: NumpyLayer) -> list[Array]:
            x = input.value.astype(np.float64)
            spread = np.sqrt(x.var(axis=1, keepdims=True) + layer.epsilon)
            y = (x - x.mean(axis=1, keepdims=True)) / spread * scale.value + bias.value
            return [y.astype(input.value.dtype)]

        return self._layer("NORMALIZATION", (input, scale, bias), compute)

    def add_matrix_multiply(self, input0: NumpyTensor, op0: bool, input1: NumpyTensor, op1: bool) -> NumpyLayer:
        """op: transposed or not."""
        one, other = ((x.value.T if op else x.value) for x, op in ((input0, op0), (input1, op1)))
        assert one.dtype == other.dtype
        return self._layer(
            "MATRIX_MULTIPLY",
            (input0, input1),
            lambda layer: [(one.astype(np.float32) @ other.astype(np.float32)).astype(one.dtype)],
        )

    def add_plugin_v3(self, inputs: Sequence[NumpyTensor], shape_inputs: Sequence[Any], plugin: Any) -> NumpyLayer:
        assert not shape_inputs
        return self._layer("PLUGIN_V3", inputs, lambda layer: self._attend(plugin, [each.value for each in inputs]))


def _relu(x: Array) -> Array:
    return np.asarray(np.maximum(x, 0))


class NumpyTrt:
    """The module. Members of its enumerations are what computes them."""

    float32, float16, int32, int64 = (np.dtype(each) for each in (np.float32, np.float16, np.int32, np.int64))
    bfloat16 = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
    UnaryOperation = SimpleNamespace(SQRT=np.sqrt)
    ActivationType = SimpleNamespace(
        SIGMOID=_sigmoid, TANH=np.tanh, RELU=_relu, GELU_TANH=_gelu_tanh, GELU_ERF=_gelu_erf
    )
    ElementWiseOperation = SimpleNamespace(SUM=np.add, PROD=np.multiply, DIV=np.divide)
    ReduceOperation = SimpleNamespace(AVG=np.mean)
    MatrixOperation = SimpleNamespace(NONE=False, TRANSPOSE=True)

    @staticmethod
    def Weights(values: Array) -> Array:  # noqa: N802
        """As it is."""
        return values
