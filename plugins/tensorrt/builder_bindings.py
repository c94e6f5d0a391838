"""What building through the network API uses of TensorRT's Python bindings, as types: they have none. Tests hold these
against the wheels of 10.16 and 11.

Enumerations are opaque here; shapes are tuples, -1 for a length that changes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

Dims = tuple[int, ...]


class ITensor(Protocol):
    """A tensor of a network."""

    name: str
    shape: Sequence[int]

    def set_dimension_name(self, index: int, name: str) -> None: ...


class ILayer(Protocol):
    """A layer of a network."""

    name: str
    metadata: str

    def get_output(self, index: int) -> ITensor: ...

    def set_input(self, index: int, tensor: ITensor) -> None: ...


class IConcatenationLayer(ILayer, Protocol):
    axis: int


class INormalizationLayer(ILayer, Protocol):
    epsilon: float


class IShuffleLayer(ILayer, Protocol):
    reshape_dims: Dims


class INetworkDefinition(Protocol):
    """A network. Methods that add a layer give None where the library refuses it."""

    num_layers: int

    def get_layer(self, index: int) -> Any: ...

    def add_input(self, name: str, dtype: Any, shape: Dims) -> ITensor | None: ...

    def mark_output(self, tensor: ITensor) -> None: ...

    def add_constant(self, shape: Dims, weights: Any) -> ILayer | None: ...

    def add_cast(self, input: ITensor, to_type: Any) -> ILayer | None: ...

    def add_identity(self, input: ITensor) -> ILayer | None: ...

    def add_shape(self, input: ITensor) -> ILayer | None: ...

    def add_shuffle(self, input: ITensor) -> IShuffleLayer | None: ...

    def add_slice(self, input: ITensor, start: Dims, shape: Dims, stride: Dims) -> ILayer | None: ...

    def add_concatenation(self, inputs: Sequence[ITensor]) -> IConcatenationLayer | None: ...

    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> ILayer | None: ...

    def add_unary(self, input: ITensor, op: Any) -> ILayer | None: ...

    def add_activation(self, input: ITensor, type: Any) -> ILayer | None: ...

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: Any) -> ILayer | None: ...

    def add_reduce(self, input: ITensor, op: Any, axes: int, keep_dims: bool) -> ILayer | None: ...

    def add_normalization_v2(
        self,
        input: ITensor,
        scale: ITensor,
        bias: ITensor,
        axesMask: int,  # noqa: N803
    ) -> INormalizationLayer | None: ...

    def add_matrix_multiply(self, input0: ITensor, op0: Any, input1: ITensor, op1: Any) -> ILayer | None: ...

    def add_plugin_v3(
        self, inputs: Sequence[ITensor], shape_inputs: Sequence[ITensor], plugin: Any
    ) -> ILayer | None: ...


class EngineInspector(Protocol):
    """What the library says of the layers of an engine."""

    def get_engine_information(self, format: Any) -> str: ...


class ICudaEngine(Protocol):
    """An engine, read back."""

    def create_engine_inspector(self) -> EngineInspector: ...

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int: ...


class Runtime(Protocol):
    """What reads engines."""

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None: ...


class ITimingCache(Protocol):
    """Times of tactics."""

    def serialize(self) -> Any: ...


class IBuilderConfig(Protocol):
    """How a network is compiled."""

    profiling_verbosity: Any
    max_aux_streams: int
    builder_optimization_level: int

    def set_preview_feature(self, feature: Any, enable: bool) -> None: ...

    def clear_flag(self, flag: Any) -> None: ...

    def add_optimization_profile(self, profile: Any) -> int: ...

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache: ...

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool: ...

    def get_timing_cache(self) -> ITimingCache: ...


class IOptimizationProfile(Protocol):
    """Between which numbers lengths lie."""

    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None: ...


class Builder(Protocol):
    """The compiler."""

    def create_network(self, flags: int = 0) -> INetworkDefinition: ...

    def create_builder_config(self) -> IBuilderConfig: ...

    def create_optimization_profile(self) -> IOptimizationProfile: ...

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> Any: ...
