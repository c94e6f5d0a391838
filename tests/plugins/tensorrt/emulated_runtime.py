"""TensorRT's runtime as far as a session uses it, in place of the bindings: networks run in numpy on the memory of the
emulated GPU, and the attention by the real plugin, whose kernels run there.

Strict where the library is: every input needs a shape within the profile's ranges and an address, pools are updated in
place only if input and output lie at one address, and memory must be as large as was asked for. A context is captured
only after it has run with its shapes, and a graph runs only while its context still has them.
"""

import ctypes
import enum
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ingot.plan import Plan
from ingot.plugins.tensorrt.attention import Attention
from ingot.plugins.tensorrt.plugin import IN_PLACE
from ingot.plugins.tensorrt.tensors import (
    LOGITS,
    UPDATED,
    Dim,
    Profile,
    Tensor,
    outputs,
    pools,
    profiles,
    step_inputs,
    weights,
)
from tests.plugins.tensorrt.network import Array, evaluator

DEVICE_MEMORY = 4096


class Validity(enum.Enum):
    VALID = 0
    INVALID = 2


class Strategy(enum.Enum):
    USER_MANAGED = 2


class Specialisation(enum.Enum):
    LAZY = 0
    EAGER = 1


class EmulatedConfig:
    """IRuntimeConfig."""

    def __init__(self) -> None:
        self.dynamic_shapes_kernel_specialization_strategy = Specialisation.LAZY
        self.strategy: Strategy | None = None

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy


class FieldType(enum.Enum):
    FLOAT32 = 1
    INT32 = 5


class Field:
    """PluginField."""

    def __init__(self, name: str, data: Array, type: FieldType) -> None:
        self.name, self.data, self.type = name, data, type


class Registry:
    """Knows one creator."""

    def __init__(self) -> None:
        self.creator: Any = None

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creator = creator
        return True


class Described:
    """PluginTensorDesc."""

    def __init__(self, array: Array) -> None:
        self.dims = array.shape


class EmulatedContext:
    """IExecutionContext."""

    def __init__(self, engine: "EmulatedEngine") -> None:
        self._engine = engine
        self._profile: Profile | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = 0
        self._plugins = [plugin.attach_to_context(None) for plugin in engine.plugins]
        self._network: ReferenceEvaluator = evaluator(engine.model, self._attend)
        self._stream = 0
        self._ran: dict[str, tuple[int, ...]] = {}  # shapes of the last run

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profiles(self._engine.plan)[profile_index]
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= DEVICE_MEMORY
        self._memory = memory

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        tensor = self._engine.inputs[name]
        fits = len(shape) == len(tensor.shape)
        for given, wanted in zip(shape, tensor.shape, strict=False):
            span = self._profile.ranges[wanted] if isinstance(wanted, Dim) else None
            fits &= given == wanted if span is None else span.least <= given <= span.most
        self._shapes[name] = shape
        return fits

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory != 0 and (name in self._engine.inputs or name in self._engine.outputs)

    def infer_shapes(self) -> list[str]:
        return []

    def is_stream_capturable(self, stream: int) -> bool:
        return self._ran == self._shapes

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Runs at once, after what was enqueued before; in a capture, whenever the graph is replayed."""
        owner, self._stream = self._engine.owner, stream_handle
        if not owner.driver.emulated_capturing():
            self._wait()
            self._ran = dict(self._shapes)
            self._run()
            return True
        if self._ran != self._shapes:
            return False
        captured = dict(self._shapes)

        def replay() -> None:
            assert self._shapes == captured, "the context of a graph has got other shapes"
            self._run()
            owner.replays += 1

        owner.enqueue(replay)
        return True

    def _run(self) -> None:
        assert self._memory, "there is no memory for activations"
        given = {name: self._array(tensor, name) for name, tensor in self._engine.inputs.items()}
        (logits,) = map(np.asarray, self._network.run([LOGITS], given))
        ctypes.memmove(self._addresses[LOGITS], np.ascontiguousarray(logits).ctypes.data, logits.nbytes)
        self._engine.owner.steps.append((self._profile.name if self._profile else "", len(given["ids"])))

    def _array(self, tensor: Tensor, name: str) -> Array:
        """What lies on the device, as it lies."""
        shape = [each for each in tensor.shape if isinstance(each, int)]
        sized = self._shapes[name] if len(shape) < len(tensor.shape) else tuple(shape)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype.onnx))
        nbytes = int(np.prod(sized)) * dtype.itemsize
        memory = (ctypes.c_uint8 * nbytes).from_address(self._addresses[name])
        return np.ctypeslib.as_array(memory).view(dtype).reshape(sized)

    def _attend(self, attention: Attention, inputs: Sequence[Array]) -> tuple[Array, Array, Array]:
        plugin = self._plugins[attention.layer]
        assert plugin.attention == attention, "what was serialised is what the network says"
        for index, kind in zip(IN_PLACE, ("keys", "values"), strict=True):
            name = f"{kind}.{attention.layer}"
            assert inputs[index].ctypes.data == self._addresses[name] == self._addresses[name + UPDATED]
        rows = [each if each.flags.c_contiguous else np.ascontiguousarray(each) for each in inputs]
        dtype = rows[1].dtype if attention.narrow else np.dtype(np.float32)
        y = np.zeros((len(rows[0]), attention.heads * attention.head_dim), dtype)
        workspace = np.zeros(plugin.get_workspace_size([_Largest(rows[0].shape)], []), np.uint8)
        made = [y.ctypes.data, rows[1].ctypes.data, rows[2].ctypes.data]
        described = [Described(each) for each in rows]
        plugin.enqueue(described, [], [each.ctypes.data for each in rows], made, workspace.ctypes.data, self._stream)
        self._wait()
        return y, rows[1], rows[2]

    def _wait(self) -> None:
        status = self._engine.owner.driver.cuStreamSynchronize(ctypes.c_void_p(self._stream))
        assert status == 0, f"the emulated driver says {status}"


class _Largest:
    """DynamicPluginTensorDesc, as far as its largest shape goes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.max = shape


class EmulatedEngine:
    """ICudaEngine."""

    num_optimization_profiles = 2

    def __init__(self, owner: "EmulatedTensorRt", plan: Plan, model: onnx.ModelProto) -> None:
        self.owner, self.plan, self.model = owner, plan, model
        self.inputs = {each.name: each for each in (*step_inputs(plan), *pools(plan), *weights(plan))}
        self.outputs = {each.name: each for each in outputs(plan)}
        self._names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self._names)
        creator = owner.registry.creator
        nodes = [node for node in model.graph.node if node.domain]
        self.plugins = []
        for node in nodes:  # as built, then as serialised
            values = {each.name: np.array([onnx.helper.get_attribute_value(each)]) for each in node.attribute}
            fields = [Field(name, value, FieldType.INT32) for name, value in values.items()]
            built = creator.create_plugin(node.name, fields, None)
            self.plugins.append(creator.create_plugin(node.name, built.get_fields_to_serialize(), None))

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return DEVICE_MEMORY

    def create_runtime_config(self) -> EmulatedConfig:
        return EmulatedConfig()

    def create_execution_context(self, runtime_config: EmulatedConfig) -> EmulatedContext:
        assert runtime_config.strategy is Strategy.USER_MANAGED, "the session gives the memory"
        return EmulatedContext(self)


class EmulatedTensorRt(types.ModuleType):
    """The module.

    model    the network that was compiled; None: no engine is loaded
    steps    (profile, tokens) of each step that ran
    replays  how many were graphs
    valid    what the runtime says of an engine
    """

    def __init__(self, driver: ctypes.CDLL, plan: Plan, model: onnx.ModelProto | None = None) -> None:
        super().__init__("emulated_tensorrt")
        self.driver, self.plan, self.model, self.registry = driver, plan, model, Registry()
        self.steps: list[tuple[str, int]] = []
        self.replays = 0
        self._calls: list[Callable[[], None]] = []
        self._call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(self._done)
        self.valid = True
        for name in (
            "IPluginV3",
            "IPluginV3OneCore",
            "IPluginV3OneBuildV2",
            "IPluginV3OneRuntime",
            "IPluginCreatorV3One",
            "ILogger",
        ):
            setattr(self, name, type(name, (), {}))
        self.PluginField, self.PluginFieldType, self.PluginFieldCollection = Field, FieldType, list
        self.EngineValidity, self.ExecutionContextAllocationStrategy = Validity, Strategy
        self.DynamicShapesKernelSpecializationStrategy = Specialisation

    def enqueue(self, call: Callable[[], None]) -> None:
        """In the order of the stream, or in the graph that it captures."""
        self._calls.append(call)
        self.driver.emulated_enqueue_call(self._call, len(self._calls) - 1)

    def _done(self, number: int) -> int:
        try:
            self._calls[number]()
        except Exception:
            traceback.print_exc()
            return 719  # CUDA_ERROR_LAUNCH_FAILED
        return 0

    def get_plugin_registry(self) -> Registry:
        return self.registry

    def Runtime(self, logger: Any) -> "EmulatedRuntime":  # noqa: N802
        return EmulatedRuntime(self)


class EmulatedRuntime:
    """Runtime."""

    def __init__(self, owner: EmulatedTensorRt) -> None:
        self._owner = owner

    def get_engine_validity(self, buffer: bytes) -> tuple[Validity, list[str]]:
        assert len(buffer) == 64
        return (Validity.VALID, []) if self._owner.valid else (Validity.INVALID, ["UNSUPPORTED_CC"])

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> EmulatedEngine | None:
        if not serialized_engine.endswith(b"whole"):
            return None
        assert self._owner.model is not None, "there is no network to run"
        return EmulatedEngine(self._owner, self._owner.plan, self._owner.model)
