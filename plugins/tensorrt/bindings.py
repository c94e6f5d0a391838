"""What a session uses of TensorRT's Python bindings, as types: they have none. Tests compare these with the wheel.

Sizes are bytes, addresses and streams integers.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, TextIO, runtime_checkable

from ingot.plugins.tensorrt.library import Library


class Context(Protocol):
    """IExecutionContext: one profile of an engine, ready to run."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_device_memory(self, memory: int, size: int) -> None: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def infer_shapes(self) -> list[str]: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class RuntimeConfig(Protocol):
    """IRuntimeConfig: how a context executes."""

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None: ...


@runtime_checkable
class SpecializesKernels(Protocol):
    """A runtime configuration of TensorRT-RTX, which compiles kernels for the shapes that it meets."""

    dynamic_shapes_kernel_specialization_strategy: Any


class TensorRtEngine(Protocol):
    """ICudaEngine."""

    num_io_tensors: int
    num_optimization_profiles: int

    def get_tensor_name(self, index: int) -> str: ...

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int: ...

    def create_runtime_config(self) -> RuntimeConfig: ...

    def create_execution_context(self, runtime_config: RuntimeConfig) -> Context: ...


class Runtime(Protocol):
    """Runtime."""

    def deserialize_cuda_engine(self, serialized_engine: bytes | memoryview) -> TensorRtEngine | None: ...


@runtime_checkable
class ChecksEngines(Protocol):
    """A runtime of TensorRT-RTX. The full TensorRT judges an engine when it reads it."""

    def get_engine_validity(self, buffer: bytes) -> tuple[Any, Sequence[Any]]: ...


@runtime_checkable
class JudgesStreams(Protocol):
    """A context of TensorRT-RTX. With one stream, as here, one of the full TensorRT can always be captured."""

    def is_stream_capturable(self, stream: int) -> bool: ...


def load(library: Library) -> Any:
    """The module of the bindings."""
    return importlib.import_module(library.module)


class Messages:
    """The last errors of the library, in its words."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def add(self, severity: str, message: str) -> None:
        """severity: its name."""
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self._errors = [*self._errors[-3:], message]

    def __str__(self) -> str:
        return "; ".join(self._errors) or "the library does not say why"


def logger(trt: Any, add: Any) -> Any:
    """An ILogger that hands (severity, message) to `add`."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            add(severity.name, message)

    return Logger()


def file_logger(trt: Any, file: TextIO) -> Any:
    """An ILogger that writes a line per message."""

    def write(severity: str, message: str) -> None:
        file.write(f"{severity} {message}\n")
        file.flush()  # what is not on the disk when the library ends the process is lost

    return logger(trt, write)
