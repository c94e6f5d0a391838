"""The CUDA driver, through cuda-python: which GPUs there are, and one of them as a Device.

Every call's return code is checked; what goes wrong is raised in words.
"""

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.configs.sizes import format_bytes
from ingot.errors import CapacityError, TargetError, install

INSTALL = install("cuda")

_POLLS, _NAP = 100, 2e-5  # looks in a row; seconds of sleep between later ones

Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of this machine. capability: (9, 0) for sm_90; uuid: the same for all processes, whatever they see."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    uuid: str = ""

    @property
    def sm(self) -> str:
        """The number alone: 90 for capability 9.0."""
        return "".join(map(str, self.capability))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the driver shows, or why there is nothing to see. driver: the newest CUDA it supports, e.g. "13.0"."""

    gpus: tuple[Gpu, ...]
    why_not: str | None
    driver: str | None = None


def find_gpus() -> Found:
    """Asks the driver. Never raises: no library, no driver and no GPU are answers."""
    try:
        api = _api()
        count = api.check(api.driver.cuDeviceGetCount())
        version = int(api.check(api.driver.cuDriverGetVersion()))
        gpus = tuple(api.describe(index) for index in range(count))
    except TargetError as error:
        return Found(gpus=(), why_not=error.got)
    driver = f"{version // 1000}.{version % 1000 // 10}"
    return Found(gpus=gpus, why_not=None if gpus else "the NVIDIA driver shows no GPU", driver=driver)


def memory_beside(gpu: Gpu, needed: int) -> int:
    """Bytes of a GPU that are free beside `needed` ones, whatever other processes have. Raises CapacityError where
    there are none."""
    with contextlib.closing(Device(gpu)) as device:
        free = device.free_memory()
    if free <= needed:
        raise CapacityError(
            "the GPU has not enough free memory for the engine",
            where=f"GPU {gpu.index}, {gpu.name}",
            expected=f"more than {format_bytes(needed)} free, before any KV cache",
            got=f"{format_bytes(free)} free of {format_bytes(gpu.memory_bytes)}",
            hint="end what else runs on the GPU, or build the engine with a smaller max_num_tokens",
        )
    return free - needed


class _Api:
    """The bindings after cuInit."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def check(self, returned: Sequence[Any]) -> Any:
        """What a call gave beside its code. Raises CapacityError, TargetError."""
        code, *values = returned
        if int(code) != 0:
            name = getattr(code, "name", str(code))
            if name == "CUDA_ERROR_OUT_OF_MEMORY":
                raise CapacityError("the GPU has not enough free memory", hint="pass a smaller kv_cache_memory")
            raise TargetError(
                "the CUDA driver reports an error",
                got=name,
                hint="read the driver's log with `dmesg | grep -i nvrm`, then start the program again",
            )
        return values[0] if len(values) == 1 else tuple(values)

    def describe(self, index: int) -> Gpu:
        attribute = self.driver.CUdevice_attribute
        device = self.check(self.driver.cuDeviceGet(index))

        def number(name: str) -> int:
            value = self.check(self.driver.cuDeviceGetAttribute(getattr(attribute, name), device))
            return int(value)

        return Gpu(
            index=index,
            name=self.check(self.driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
            capability=(
                number("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
                number("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
            ),
            memory_bytes=int(self.check(self.driver.cuDeviceTotalMem(device))),
            multiprocessors=number("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
            uuid=bytes(self.check(self.driver.cuDeviceGetUuid(device)).bytes).hex(),
        )


def _api() -> _Api:
    """Raises TargetError whose `got` says what is missing."""
    what = "this machine cannot use an NVIDIA GPU"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TargetError(what, got=f"cuda-python is not installed ({INSTALL})") from error
    try:
        code = driver.cuInit(0)[0]
    except Exception as error:  # the bindings raise several kinds where libcuda.so.1 cannot be loaded
        raise TargetError(what, got="no NVIDIA driver is installed (libcuda.so.1)") from error
    if int(code) != 0:
        name = getattr(code, "name", str(code))
        nothing = name == "CUDA_ERROR_NO_DEVICE"
        raise TargetError(
            what,
            got="the NVIDIA driver shows no GPU" if nothing else f"the NVIDIA driver says {name}",
            hint="run nvidia-smi; in a container give --gpus all; check CUDA_VISIBLE_DEVICES; or use --target cpu",
        )
    return _Api(driver)


class Kernel:
    """A function of a loaded module."""

    def __init__(self, name: str, function: Any) -> None:
        self.name, self.function = name, function


class Arguments:
    """The values of a launch where the driver reads them: an array of pointers, one per parameter of the kernel."""

    def __init__(self, values: Sequence[Argument]) -> None:
        self._values = tuple(values)  # kept alive
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
        self.address = ctypes.addressof(self._pointers)


class Device:
    """A GPU with its primary context, one stream, and whatever was allocated on it. Not thread-safe.

    watch  called again and again while the host waits for the GPU, which may wait for other ranks: what it raises ends
           the wait
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.watch: Callable[[], None] | None = None
        self._api = _api()
        self._driver, self._check = self._api.driver, self._api.check
        device = self._check(self._driver.cuDeviceGet(gpu.index))
        with contextlib.ExitStack() as owned:
            self._context = self._check(self._driver.cuDevicePrimaryCtxRetain(device))
            self._own(owned, self._driver.cuDevicePrimaryCtxRelease, device)
            self.enter()
            flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = self._check(self._driver.cuStreamCreate(flags))
            self._overlapping: Any = None  # how launches are made that may begin before the one before has ended
            self._own(owned, self._driver.cuStreamDestroy, self._stream)
            self._owned = owned.pop_all()

    def _own(self, owned: contextlib.ExitStack, release: Callable[[Any], Sequence[Any]], what: Any) -> None:
        """`release` is called when the device is closed, after those of later things, whatever becomes of these."""
        owned.callback(lambda: self._check(release(what)))

    def enter(self) -> None:
        """Make the context current in this thread."""
        self._check(self._driver.cuCtxSetCurrent(self._context))

    @property
    def stream_address(self) -> int:
        """The stream as other libraries take it."""
        return int(self._stream)

    def free_memory(self) -> int:
        """Bytes."""
        return int(self._check(self._driver.cuMemGetInfo())[0])

    def allocate(self, nbytes: int) -> int:
        """Address of device memory, on a multiple of 256. Raises CapacityError."""
        address = int(self._check(self._driver.cuMemAlloc(max(nbytes, 256))))
        self._own(self._owned, self._driver.cuMemFree, address)
        return address

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that the device copies from and to without a detour."""
        address = int(self._check(self._driver.cuMemHostAlloc(nbytes, 0)))
        self._own(self._owned, self._driver.cuMemFreeHost, address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def upload(self, to: int, data: npt.NDArray[np.generic]) -> None:
        """Copy and wait, also for what the call leaves under way. data: contiguous."""
        if data.nbytes:
            self._check(self._driver.cuMemcpyHtoD(to, data.ctypes.data, data.nbytes))
            self._check(self._driver.cuCtxSynchronize())

    def send(self, to: int, data: npt.NDArray[np.generic]) -> None:
        """Copy in the order of the stream; `data` is pinned and stays as it is until `wait`."""
        self._check(self._driver.cuMemcpyHtoDAsync(to, data.ctypes.data, data.nbytes, self._stream))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """From one place of the device to another, in the order of the stream."""
        self._check(self._driver.cuMemcpyDtoDAsync(to, source, nbytes, self._stream))

    def fetch(self, data: npt.NDArray[np.generic], source: int) -> None:
        """Copy in the order of the stream; `data` is there after `wait`."""
        if data.nbytes:
            self._check(self._driver.cuMemcpyDtoHAsync(data.ctypes.data, source, data.nbytes, self._stream))

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.watch is not None:
            self._look(self.watch, lambda: self._driver.cuStreamQuery(self._stream))
        self._check(self._driver.cuStreamSynchronize(self._stream))

    def event(self) -> Any:
        """A mark for `record`."""
        event = self._check(self._driver.cuEventCreate(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._own(self._owned, self._driver.cuEventDestroy, event)
        return event

    def record(self, event: Any) -> None:
        """Set the mark behind all that was launched until now."""
        self._check(self._driver.cuEventRecord(event, self._stream))

    def wait_for(self, event: Any) -> None:
        """Until all that was launched before the mark is done, whatever was launched behind it."""
        if self.watch is not None:
            self._look(self.watch, lambda: self._driver.cuEventQuery(event))
        self._check(self._driver.cuEventSynchronize(event))

    def _look(self, watch: Callable[[], None], query: Callable[[], Sequence[Any]]) -> None:
        """Until the query says something else than that the GPU is busy."""
        polls = 0
        while query()[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            watch()
            polls += 1
            if polls > _POLLS:
                time.sleep(_NAP)

    def seconds(self, work: Callable[[], None], repetitions: int) -> float:
        """What `work` enqueues takes the GPU, by its own clock: the mean of the repetitions, after as many that do not
        count. They are replayed as one graph, so the time that the host takes to enqueue them is not in it."""
        flags = self._driver.CUevent_flags.CU_EVENT_DEFAULT
        with contextlib.ExitStack() as owned:
            begin, end = (self._check(self._driver.cuEventCreate(flags)) for _ in range(2))
            for event in (begin, end):
                self._own(owned, self._driver.cuEventDestroy, event)
            work()  # libraries load what they need on first use, which a capture forbids
            self.wait()

            def repeated() -> None:
                for _ in range(repetitions):
                    work()

            graph = self.capture(repeated)
            self.replay(graph)
            self._check(self._driver.cuEventRecord(begin, self._stream))
            self.replay(graph)
            self._check(self._driver.cuEventRecord(end, self._stream))
            self._check(self._driver.cuEventSynchronize(end))
            return float(self._check(self._driver.cuEventElapsedTime(begin, end))) / 1e3 / repetitions

    def load(self, image: npt.NDArray[np.uint8]) -> Any:
        """A module from machine code."""
        module = self._check(self._driver.cuModuleLoadData(image.tobytes()))
        self._own(self._owned, self._driver.cuModuleUnload, module)
        return module

    def kernel(self, module: Any, name: str, shared_bytes: int) -> Kernel:
        """A kernel that may use so much dynamic shared memory."""
        function = self._check(self._driver.cuModuleGetFunction(module, name.encode()))
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._check(self._driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return Kernel(name, function)

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Arguments,
        stream: int | None = None,
    ) -> None:
        """Asynchronous, in the order of the stream. stream: another one, by its address."""
        if (config := self._overlapping) is not None:
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.sharedMemBytes = threads, shared_bytes
            self._check(self._driver.cuLaunchKernelEx(config, kernel.function, arguments.address, 0))
            return
        where = self._stream if stream is None else self._driver.CUstream(stream)
        self._check(
            self._driver.cuLaunchKernel(
                kernel.function, *grid, threads, 1, 1, shared_bytes, where, arguments.address, 0
            )
        )

    def _overlap(self) -> Any:
        """Programmatic dependent launch: see `let_next_begin` in kernels/device.cuh. None where the GPU has none."""
        if self.gpu.capability < (9, 0):
            return None
        attribute, config = self._driver.CUlaunchAttribute(), self._driver.CUlaunchConfig()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.blockDimY = config.blockDimZ = config.numAttrs = 1
        config.hStream, config.attrs = self._stream, [attribute]
        return config

    def capture(self, launch: Callable[[], None], owned: contextlib.ExitStack | None = None) -> Any:
        """What `launch` enqueues, recorded instead of run: one graph, ready to run. Its kernels overlap where the GPU
        allows it. owned: destroys the graph; None: that is done with the device."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._check(self._driver.cuStreamBeginCapture(self._stream, mode))
        self._overlapping = self._overlap()
        try:
            launch()
        except BaseException:
            # A stream that still captures refuses all other work. What it has recorded is of no use.
            code, graph = self._driver.cuStreamEndCapture(self._stream)
            if int(code) == 0:
                self._driver.cuGraphDestroy(graph)
            raise
        finally:
            self._overlapping = None
        graph = self._check(self._driver.cuStreamEndCapture(self._stream))
        try:
            executable = self._check(self._driver.cuGraphInstantiate(graph, 0))
        finally:
            self._check(self._driver.cuGraphDestroy(graph))
        self._own(self._owned if owned is None else owned, self._driver.cuGraphExecDestroy, executable)
        return executable

    def replay(self, graph: Any) -> None:
        """Asynchronous, in the order of the stream."""
        self._check(self._driver.cuGraphLaunch(graph, self._stream))

    def close(self) -> None:
        """Give everything back, also after a fault of the GPU."""
        with self._owned:
            self.enter()
            self.wait()
