"""A TensorRT engine on a GPU: the step contract of the cuda targets, with the library in place of launches.

    batch ─tables▶ device ─▶ execution context of the profile (mixed, decode) ─▶ logits ─▶ draws
                                      └ per layer: the plugin's enqueue launches the kernels of the cubin

Weights, pools and the integers of a step are bound once; from step to step only the shapes of mixed steps change.
Decode steps are captured as CUDA graphs when the session opens, each size from an execution context of its own, so
that replaying one enters neither the library nor Python's plugins.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, EngineError, TargetError
from ingot.plan import Plan, Weight
from ingot.plugins.cuda.decode_graphs import DecodeGraphs
from ingot.plugins.cuda.gpu import Arguments, Device, Gpu
from ingot.plugins.cuda.plan_facts import tiles_of
from ingot.plugins.cuda.sampling import Sampler, draw_kernel
from ingot.plugins.cuda.shapes import partial_rows
from ingot.plugins.cuda.step_tables import ITEM, Counts, StepTables, TableLayout, check_batch, idle_batch
from ingot.plugins.tensorrt.attention import PARTIAL_ROWS, Attention, kernels, launches
from ingot.plugins.tensorrt.bindings import (
    ChecksEngines,
    Context,
    JudgesStreams,
    Messages,
    Runtime,
    SpecializesKernels,
    TensorRtEngine,
    load,
    logger,
)
from ingot.plugins.tensorrt.library import Library
from ingot.plugins.tensorrt.plan_file import HEADER_BYTES
from ingot.plugins.tensorrt.plugin import Shapes, register_attention
from ingot.plugins.tensorrt.tensors import LOGITS, UPDATED, outputs, pools, require_blocks, step_inputs, weights
from ingot.step_inputs import require_known_inputs
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult

MIXED, DECODE = 0, 1  # profiles

_INT = 4
_DESERIALISING = threading.Lock()  # the creator of plugins is one for all sessions of the process


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A TensorRT engine. where: its file, for people; library: what built it, and now runs it."""

    image: bytes
    where: str
    library: Library


class TensorRtSession:
    """One plan on one GPU.

    num_blocks  of the KV pool, without the spare one: of one cache group
    """

    most_steps = 1
    takes_drafts = False

    def __init__(
        self,
        plan: Plan,
        section: npt.NDArray[np.uint8],
        num_blocks: tuple[int, ...],
        gpu: Gpu,
        network: Network,
        code: Weight,
    ) -> None:
        """section: all weights; code: the machine code among them that is for this GPU."""
        require_known_inputs(plan)
        (self._blocks,) = self.num_blocks = num_blocks
        require_blocks(plan, self._blocks)
        if (rows := partial_rows(plan)) > PARTIAL_ROWS:
            raise EngineError(
                "the parts of attention do not fit the network's workspace",
                where="plan: splits",
                expected=f"at most {PARTIAL_ROWS} rows of partial sums",
                got=str(rows),
                hint=REBUILD,
            )
        self._plan, self._library = plan, network.library
        self._contexts: dict[int | None, Context] = {}  # by size of decode steps; None: of mixed steps
        self._loaded: list[Any] = []  # runtime and engine, which contexts need
        with contextlib.ExitStack() as opened:
            self.device = opened.enter_context(contextlib.closing(Device(gpu)))
            opened.callback(self._forget)
            self._load(section, code)
            self._make_contexts(self._deserialise(network.image, network.where))
            self._capture_decode()
            self._opened = opened.pop_all()

    def _forget(self) -> None:
        """The library's objects need those that were made before them, and the device's memory."""
        self._contexts.clear()
        while self._loaded:
            self._loaded.pop()

    def _load(self, section: npt.NDArray[np.uint8], code: Weight) -> None:
        """Everything that has a place on the device but the engine's own memory."""
        device, plan = self.device, self._plan
        tiles = tiles_of(plan)
        layout = TableLayout.of(plan, tiles)
        self._tables_at, self._width = device.allocate(_INT * layout.total), layout.width
        pinned = device.pinned(_INT * layout.total)
        self._tables = StepTables(layout, pinned, tiles, plan.limits, spare_blocks=self.num_blocks)
        tables = {name: self._tables_at + _INT * offset for name, offset in layout.offsets.items()}
        weights_at = device.allocate(section.nbytes)
        device.upload(weights_at, section)
        self._logits_at = device.allocate(_INT * plan.limits.max_logit_rows * plan.vocab_size)
        self._addresses = {LOGITS: self._logits_at, "splits": self._tables_at}  # of splits, nobody reads the numbers
        self._addresses |= {each.name: tables[each.name] for each in step_inputs(plan) if each.name in tables}
        offsets = {weight.name: weight.pieces[0].offset for weight in plan.weights}
        self._addresses |= {each.name: weights_at + offsets[each.name] for each in weights(plan)}
        bytes_of = {"keys": plan.caches[0].k_block_bytes, "values": plan.caches[0].v_block_bytes}
        for pool in pools(plan):
            place = device.allocate(bytes_of[pool.name.split(".")[0]] * (self._blocks + 1))
            self._addresses |= {pool.name: place, pool.name + UPDATED: place}
        (piece,) = code.pieces
        module = device.load(section[piece.offset : piece.offset + code.nbytes])
        draws = draw_kernel(plan)
        wanted = {**kernels(plan.caches[0]), draws: 0}
        self._kernels = {name: device.kernel(module, name, shared) for name, shared in wanted.items()}
        self._sampler = Sampler(device, self._kernels[draws], plan, device.allocate(_INT * plan.limits.max_batch_size))
        self._graphs = DecodeGraphs(device, plan)

    def _deserialise(self, image: bytes, where: str) -> TensorRtEngine:
        trt = load(self._library)
        self._messages = Messages()
        self._logger = logger(trt, self._messages.add)
        runtime: Runtime = trt.Runtime(self._logger)
        self._loaded.append(runtime)
        if isinstance(runtime, ChecksEngines):
            validity, reasons = runtime.get_engine_validity(image[:HEADER_BYTES])
            if validity == trt.EngineValidity.INVALID:
                raise TargetError(
                    "TensorRT refuses the engine on this GPU",
                    where=where,
                    expected=str(self._library),
                    got=str(reasons),
                    hint="build it again for this GPU, or for a cuda target",
                )
        creator = register_attention(trt)
        with _DESERIALISING:
            creator.launcher = self._launch
            try:
                engine: TensorRtEngine | None = runtime.deserialize_cuda_engine(image)
            finally:
                creator.launcher = None
        if engine is None:
            raise EngineError("TensorRT cannot read the engine", where=where, got=str(self._messages))
        self._loaded.append(engine)
        plan = self._plan
        expected = {each.name for part in (step_inputs, pools, weights, outputs) for each in part(plan)}
        found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        if found != expected:
            raise EngineError(
                "the TensorRT engine is not that of the plan",
                where=where,
                got=f"other inputs and outputs: {', '.join(sorted(found ^ expected))}",
                hint="build the engine again",
            )
        return engine

    def _make_contexts(self, engine: TensorRtEngine) -> None:
        """One for mixed steps, and one per size of decode steps: the library may lay a captured context out anew when
        its shapes change. All share their memory: steps run one after the other."""
        size = max(engine.get_device_memory_size_for_profile_v2(profile) for profile in (MIXED, DECODE))
        memory = self.device.allocate(size)
        for sequences in (None, *self._graphs.sizes):
            profile = MIXED if sequences is None else DECODE
            self._contexts[sequences] = self._make_context(engine, profile, memory, size)
        self.device.wait()

    def _make_context(self, engine: TensorRtEngine, profile: int, memory: int, size: int) -> Context:
        trt = load(self._library)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # A captured graph would keep for ever the kernels that do for any shape.
        if profile == DECODE and isinstance(config, SpecializesKernels):
            eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = eager
        context = engine.create_execution_context(config)
        self._require(context.set_optimization_profile_async(profile, self.device.stream_address))
        context.set_device_memory(memory, size)
        for name, address in self._addresses.items():
            self._require(context.set_tensor_address(name, address))
        for pool in pools(self._plan):
            shape = (self._blocks + 1, *(each for each in pool.shape if isinstance(each, int)))
            self._require(context.set_input_shape(pool.name, shape))
        return context

    def _capture_decode(self) -> None:
        """A graph of every size, from a context that has run with these shapes, here with idle rows alone: then the
        library has done what it postpones to the first run, and what a capture forbids."""
        for size in self._graphs.sizes:
            context = self._contexts[size]
            counts, integers = self._tables.fill(idle_batch(), padded=size)
            self.device.send(self._tables_at, integers)
            self._execute(context, counts)
            self.device.wait()
            if not isinstance(context, JudgesStreams) or context.is_stream_capturable(self.device.stream_address):
                self._graphs.capture(counts, functools.partial(self._enqueue, context))

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence. Raises RequestError for rules or tokens that break the contract."""
        self._sampler.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._sampler.end(slot)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step. Raises RequestError for a batch that breaks the contract, before anything is computed."""
        batch = self._sampler.complete(batch)
        check_batch(batch, self._plan, self.num_blocks)
        draws = self._sampler.of_step(batch)
        self.device.enter()
        size = self._graphs.size(batch)
        # A network without a single row is not what layers are made for: row 0 is computed, and nobody reads it.
        padded = batch if len(batch.logit_rows) else dataclasses.replace(batch, logit_rows=np.zeros(1, np.int32))
        counts, integers = self._tables.fill(padded, size)
        self.device.send(self._tables_at, integers)
        self._graphs.run(counts, functools.partial(self._execute, self._contexts[size], counts))
        return self._sampler.finish(self._sampler.submit(batch, draws, self._logits_at))

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits, on the host."""
        return self._sampler.draw(slots, logits, raw)

    def close(self) -> None:
        """Give the GPU's memory back, also after a fault of the GPU."""
        with self._opened:
            self.device.enter()
            self.device.wait()

    def _execute(self, context: Context, counts: Counts) -> None:
        splits = self._plan.parts_of(counts.decode, counts.longest)
        shapes = {
            "ids": (counts.tokens,),
            "positions": (counts.tokens,),
            "sequences": (counts.tokens,),
            "rows": (counts.logit_rows,),
            "tables": (counts.sequences, self._width),
            "decode": (counts.decode, ITEM),
            "prefill": (counts.prefill, ITEM),
            "splits": (splits,),
        }
        for name, shape in shapes.items():
            self._require(context.set_input_shape(name, shape))
        self._enqueue(context)

    def _enqueue(self, context: Context) -> None:
        self._require(context.execute_async_v3(self.device.stream_address))

    def _launch(
        self,
        attention: Attention,
        shapes: Shapes,
        given: Sequence[int],
        made: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """What a plugin's enqueue does."""
        work, counts, splits = launches(attention, self._plan.caches[0].dtype, shapes, given, made[0], workspace)
        for each in work:
            grid = each.grid(counts, splits)
            if min(grid) > 0 and not (each.only_split and splits == 1):
                kernel, arguments = self._kernels[each.kernel], Arguments(each.arguments)
                self.device.launch(kernel, grid, each.threads, each.shared, arguments, stream)

    def _require(self, done: bool) -> None:
        if not done:
            raise TargetError("TensorRT cannot run the engine", where=str(self._library), got=str(self._messages))
