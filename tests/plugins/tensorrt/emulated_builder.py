"""The builder of the full TensorRT as `compile_on_gpu` uses it: layers are computed in numpy on zeros, so that types
and shapes are held against each other; the engine is a text, its layers as the inspector tells them and the way it was
built. A cache of times is refused if it is of another GPU."""

import enum
import json
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.plugins.tensorrt.numpy_network import Array, NumpyLayer, NumpyNetwork, NumpyTensor, NumpyTrt

_TYPES = {"MATRIX_MULTIPLY": "gemm", "PLUGIN_V3": "PluginV3", "CONSTANT": "Constant", "SHAPE": "shape_call"}
LENGTH = 3  # of whatever changes from step to step


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class Field:
    """PluginField."""

    def __init__(self, name: str, data: Array, type: Any) -> None:
        self.name, self.data, self.type = name, data, type


class _Network(NumpyNetwork):
    def add_input(self, name: str, dtype: Any, shape: tuple[int, ...]) -> NumpyTensor:
        return NumpyTensor(np.zeros([LENGTH if each < 0 else each for each in shape], dtype), name)

    def __init__(self) -> None:
        self.plugins: list[tuple[Any, Sequence[Array]]] = []
        super().__init__({}, self._attend_zeros)

    def _attend_zeros(self, plugin: Any, given: Sequence[Array]) -> tuple[Array, ...]:
        self.plugins.append((plugin, given))
        return _attend(plugin, given)

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    def get_layer(self, index: int) -> Any:
        return types.SimpleNamespace(type=types.SimpleNamespace(name=self.kinds[index]))


def _attend(plugin: Any, given: Sequence[Array]) -> tuple[Array, ...]:
    attention = plugin.attention
    dtype = given[1].dtype if attention.narrow else np.float32
    return np.zeros((len(given[0]), attention.heads * attention.head_dim), dtype), given[1], given[2]


class _Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data + b"."


class _Config:
    def __init__(self) -> None:
        self.builder_optimization_level = 3
        self.profiles: list[dict[str, Any]] = []
        self.preview: list[str] = []
        self.cache: _Cache | None = None

    def set_preview_feature(self, feature: str, enable: bool) -> None:
        self.preview += [feature] if enable else []

    def clear_flag(self, flag: str) -> None:
        assert flag == "TF32"

    def add_optimization_profile(self, profile: "_Profile") -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> _Cache:
        return _Cache(serialized_timing_cache)

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return not cache.data.startswith(b"another GPU")

    def get_timing_cache(self) -> _Cache:
        assert self.cache is not None
        return self.cache


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, input: str, min: tuple[int, ...], opt: tuple[int, ...], max: tuple[int, ...]) -> None:
        assert all(a <= b <= c for a, b, c in zip(min, opt, max, strict=True)), input
        self.shapes[input] = (min, opt, max)


class _Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def create_network(self, flags: int = 0) -> _Network:
        assert flags == 1 << NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return _Network()

    def create_builder_config(self) -> _Config:
        return _Config()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: _Config) -> bytes | None:
        assert config.preview == ["ALIASED_PLUGIN_IO_10_03"]
        assert len(config.profiles) == 2
        assert set(config.profiles[0]) == set(config.profiles[1])
        self._logger.log(types.SimpleNamespace(name="INFO"), f"{len(network.kinds)} layers")
        timed = config.builder_optimization_level > 0
        for plugin, given in network.plugins if timed else ():
            # With made-up integers and no session: what launches here writes to memory that is not there.
            described = [types.SimpleNamespace(dims=each.shape) for each in given]
            addresses = [each.ctypes.data for each in given]
            plugin.attach_to_context(None).enqueue(described, [], addresses, addresses[:3], addresses[0], 0)
            self._logger.log(types.SimpleNamespace(name="VERBOSE"), f"timed attention {plugin.attention.layer}")
        layers = [_said(layer, profile) for profile in range(len(config.profiles)) for layer in network.layers]
        return f"{json.dumps({'Layers': layers, 'Bindings': []})}\n{'timed' if timed else 'untimed'}, whole".encode()


def _said(layer: NumpyLayer, profile: int) -> dict[str, Any]:
    """As detailed as the library says it; names of the second profile end with its number."""
    end = f" [profile {profile}]" if profile else ""
    tensors = [
        [{"Name": each.name + end, "Dimensions": [-1]} for each in part] for part in (layer.reads, layer.outputs)
    ]
    return {
        "Name": layer.name + end,
        "LayerType": _TYPES.get(layer.kind, "kgen"),
        "Inputs": tensors[0],
        "Outputs": tensors[1],
        "TacticName": "",
        "StreamId": 0,
        "Metadata": layer.metadata,
    }


class Runtime:
    """What reads engines."""

    def __init__(self, logger: Any) -> None:
        assert isinstance(logger, ILogger)

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "_Engine":
        return _Engine(serialized_engine.splitlines()[0].decode())


class _Engine:
    def __init__(self, said: str) -> None:
        self._said = said

    def create_engine_inspector(self) -> Any:
        return types.SimpleNamespace(get_engine_information=lambda format: {"JSON": self._said}[format])

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return (3 - profile_index) << 20


class IPluginV3: ...


class IPluginV3OneCore: ...


class IPluginV3OneBuildV2: ...


class IPluginV3OneRuntime: ...


class IPluginCreatorV3One: ...


class ILogger: ...


Builder, PluginField, PluginFieldCollection = _Builder, Field, list
PluginFieldType = types.SimpleNamespace(FLOAT32=1, INT32=5)
PreviewFeature = types.SimpleNamespace(ALIASED_PLUGIN_IO_10_03="ALIASED_PLUGIN_IO_10_03")
BuilderFlag = types.SimpleNamespace(TF32="TF32")
LayerInformationFormat = types.SimpleNamespace(JSON="JSON")
ProfilingVerbosity = types.SimpleNamespace(DETAILED="DETAILED")
float32, float16, bfloat16, int32, int64 = (
    NumpyTrt.float32,
    NumpyTrt.float16,
    NumpyTrt.bfloat16,
    NumpyTrt.int32,
    NumpyTrt.int64,
)
UnaryOperation, ActivationType, ReduceOperation = (
    NumpyTrt.UnaryOperation,
    NumpyTrt.ActivationType,
    NumpyTrt.ReduceOperation,
)
ElementWiseOperation, MatrixOperation = NumpyTrt.ElementWiseOperation, NumpyTrt.MatrixOperation
Weights = NumpyTrt.Weights


def get_plugin_registry() -> Any:
    return types.SimpleNamespace(register_creator=lambda creator, namespace: True)
