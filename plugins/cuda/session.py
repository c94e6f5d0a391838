"""An engine on a GPU: memory, one upload per step, launches or a graph of them, and the draws.

batch ─tables▶ device ─▶ embed ▶ ... ▶ logits ─▶ draws
"""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import to_float32
from ingot.errors import RequestError, TargetError
from ingot.plan import Plan, Rows
from ingot.plugins.cuda.bind import bind
from ingot.plugins.cuda.decode_graphs import DecodeGraphs
from ingot.plugins.cuda.draw_rows import DrawLayout
from ingot.plugins.cuda.gpu import Arguments, Device, Gpu, Kernel
from ingot.plugins.cuda.kv_blocks import unpack
from ingot.plugins.cuda.plan_facts import code_weights, needs_library, scratch_bytes, tiles_of, weight_places
from ingot.plugins.cuda.products import WORKSPACE_BYTES, Products
from ingot.plugins.cuda.sampling import Sampler, Submitted, draw_kernel
from ingot.plugins.cuda.shapes import partial_rows, partial_sums, product_rows
from ingot.plugins.cuda.step_tables import Counts, StepTables, TableLayout, check_batch, check_next, idle_batch
from ingot.plugins.cuda.work import Addresses, Bound, Exchange, Launch, Multiply, Work, cache_places
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ahead, Float32, Int32, SequenceRules, StepBatch, StepResult, goes_on

_INT = 4


def device_bytes(plan: Plan) -> int:
    """What a session of a plan allocates on its GPU, with the spare block but without the KV cache."""
    scratch, rows = scratch_bytes(plan), partial_rows(plan)
    tables = _INT * TableLayout.of(plan, tiles_of(plan)).total
    partial = 4 * partial_sums(plan) + 8 * rows
    drawn = DrawLayout.of(plan).nbytes if plan.logits else 0  # of a pipeline stage before the last
    parts = scratch.sums + scratch.exchanged
    arena = weight_places(plan)[1] + plan.arena_bytes + parts
    return arena + tables + partial + drawn + plan.block_bytes + (WORKSPACE_BYTES if needs_library(plan) else 0)


def _spare_blocks(plan: Plan, num_blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Where idle rows write, in each cache group: behind the blocks; they leave no state."""
    return tuple(-1 if kv.state else count for kv, count in zip(plan.caches, num_blocks, strict=True))


def _load_code(device: Device, plan: Plan, weights: npt.NDArray[np.uint8]) -> dict[int, Any]:
    """Size of heads → the module that has their kernels; 0: the one with all other kernels."""
    modules: dict[int, Any] = {}
    for head_dim, code in code_weights(plan).items():
        (piece,) = code.pieces
        modules[head_dim] = device.load(weights[piece.offset : piece.offset + code.nbytes])
        modules.setdefault(0, modules[head_dim])
    return modules


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A launch with its kernel and arguments in place."""

    launch: Launch
    kernel: Kernel
    arguments: Arguments


_Prepared = _Ready | Multiply | Exchange


class PlanOnGpu:
    """One plan on one GPU, which computes its steps.

    num_blocks  of the pool of each cache group, without the spare one
    device, addresses  where everything lies, for those who look into it
    """

    most_steps = 1
    takes_drafts = False
    place = 0  # among the ranks of a pipeline stage

    def __init__(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, gpu: Gpu) -> None:
        self.num_blocks = options.num_blocks
        self._plan = plan
        self._most_rows = {Rows.TOKENS: plan.limits.max_num_tokens, Rows.LOGITS: plan.limits.max_logit_rows}
        with contextlib.ExitStack() as opened:
            self.device = opened.enter_context(contextlib.closing(Device(gpu)))
            self._open(plan, weights, opened)
            self._opened = opened.pop_all()

    def _open(self, plan: Plan, weights: npt.NDArray[np.uint8], opened: contextlib.ExitStack) -> None:
        self._load(plan, weights, opened)
        self._capture_decode()

    def _load(self, plan: Plan, weights: npt.NDArray[np.uint8], opened: contextlib.ExitStack) -> None:
        device, spare = self.device, _spare_blocks(plan, self.num_blocks)
        blocks = tuple(count if kv.state else count + 1 for kv, count in zip(plan.caches, self.num_blocks, strict=True))
        tiles = tiles_of(plan)
        layout, scratch = TableLayout.of(plan, tiles), scratch_bytes(plan)
        tables = device.allocate(_INT * layout.total)
        rows = partial_rows(plan)
        self.addresses = Addresses(
            weights=device.allocate(weight_places(plan)[1]),
            arena=device.allocate(plan.arena_bytes),
            kv=tuple(device.allocate(kv.block_bytes * n) for kv, n in zip(plan.caches, blocks, strict=True)),
            num_blocks=blocks,
            sums=device.allocate(scratch.sums),
            exchanged=device.allocate(scratch.exchanged) if scratch.exchanged else 0,
            place=self.place,
            drawn=device.allocate(_INT * plan.limits.max_batch_size),
            partial=device.allocate(4 * partial_sums(plan)),
            stats=device.allocate(8 * rows),
            tables={name: tables + _INT * offset for name, offset in layout.offsets.items()},
            table_width=layout.width,
        )
        self._upload(plan, weights)
        self._tables_at = tables
        self._tables = [
            StepTables(layout, device.pinned(_INT * layout.total), tiles, plan.limits, spare_blocks=spare)
            for _ in range(2)  # of two steps under way
        ]
        self._products: Products | None = None
        if needs_library(plan):
            products = Products(device.allocate(WORKSPACE_BYTES), device.stream_address)
            self._products = opened.enter_context(contextlib.closing(products))
        self._steps = bind(plan, self.addresses)
        draws = draw_kernel(plan) if plan.logits else ""
        self._kernels = self._load_kernels(_load_code(device, plan, weights), draws)
        self._ready = [[self._prepared(each) for each in bound.work] for bound in self._steps]
        if plan.logits:  # else it is a pipeline stage before the last, which draws nothing
            self._sampler = Sampler(device, self._kernels[draws, 0], plan, self.addresses.drawn)
            logits = next(buffer for buffer in plan.buffers if buffer.name == plan.logits)
            self._logits_at = self.addresses.arena + logits.offset
        self._graphs = DecodeGraphs(device, plan, opened.enter_context(contextlib.ExitStack()))

    def _upload(self, plan: Plan, weights: npt.NDArray[np.uint8]) -> None:
        places, _ = weight_places(plan)
        for weight in plan.weights:
            experts = weight.shape[0] if len(weight.shape) == 3 and len(weight.pieces) > 1 else 1
            whole = weight.nbytes // experts
            unit = whole // weight.pieces[-1].end  # of a row or a panel
            for piece in weight.pieces:  # a piece holds its panels of each expert
                size, to = (piece.end - piece.begin) * unit, self.addresses.weights + places[weight.name]
                for expert in range(experts):
                    begin = piece.offset + expert * size
                    self.device.upload(to + expert * whole + piece.begin * unit, weights[begin : begin + size])

    def _capture_decode(self) -> None:
        """A graph of every size, so that no step that serves waits for one. Each runs first with idle rows alone."""
        for size in self._graphs.sizes:
            counts, integers = self._tables[0].fill(idle_batch(), padded=size)
            self.device.send(self._tables_at, integers)
            self._launch_all(counts)
            self.device.wait()
            self._graphs.capture(counts, functools.partial(self._launch_all, counts))

    def _load_kernels(self, modules: Mapping[int, Any], draws: str) -> dict[tuple[str, int], Kernel]:
        """By name and size of heads."""
        wanted = {(draws, 0): 0} if draws else {}
        for bound in self._steps:
            for each in bound.work:
                if isinstance(each, Launch):
                    key = each.kernel, each.head_dim
                    wanted[key] = max(each.shared, wanted.get(key, 0))
        return {
            (name, head_dim): self.device.kernel(modules[head_dim], name, shared)
            for (name, head_dim), shared in wanted.items()
        }

    def _prepared(self, work: Work) -> _Prepared:
        if not isinstance(work, Launch):
            return work
        return _Ready(
            launch=work, kernel=self._kernels[work.kernel, work.head_dim], arguments=Arguments(work.arguments)
        )

    def _compute_tapped(self, batch: StepBatch, steps: Sequence[str]) -> dict[str, dict[str, Float32]]:
        """A step, plan step by plan step: what each of the named ones wrote."""
        self.device.enter()
        counts, integers = self._tables[0].fill(batch)
        self.device.send(self._tables_at, integers)
        splits = self._splits(counts)
        outputs: dict[str, dict[str, Float32]] = {}
        for index, bound in enumerate(self._steps):
            self._launch_step(index, counts, splits)
            if bound.step.name in steps:
                outputs[bound.step.name] = self._outputs(bound, counts)
        return outputs

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values of a block, each [kv_heads, tokens_per_block, head_dim]."""
        kv, keys_at, values_at = cache_places(self._plan.caches, self.addresses, layer)

        def fetched(place: int, block_bytes: int, dim: int) -> Float32:
            stored = np.empty(block_bytes, np.uint8)
            self.device.fetch(stored, place + block * block_bytes)
            self.device.wait()
            numbers, scales = unpack(stored, kv, dim)
            return numbers[..., : kv.head_dim] * scales[..., None]

        self.device.enter()
        keys = fetched(keys_at, kv.k_block_bytes, kv.head_dim)
        if kv.latent:
            return keys, keys[..., : kv.latent]
        return keys, fetched(values_at, kv.v_block_bytes, kv.padded_dim)

    def close(self) -> None:
        """Give the GPU's memory back, also after a fault of the GPU."""
        with self._opened:
            self.device.enter()
            self.device.wait()

    def _splits(self, counts: Counts) -> int:
        return self._plan.parts_of(counts.decode, counts.longest)

    def _launch_all(self, counts: Counts) -> None:
        splits = self._splits(counts)
        for index in range(len(self._ready)):
            self._launch_step(index, counts, splits)

    def _launch_step(self, index: int, counts: Counts, splits: int) -> None:
        for work in self._ready[index]:
            self._launch_work(work, counts, splits)

    def _launch_work(self, work: _Prepared, counts: Counts, splits: int) -> None:
        if isinstance(work, Exchange):
            if work.numbers(counts) > 0:
                self._exchange(work, counts)
            return
        if isinstance(work, Multiply):
            if rows := work.count(counts):
                assert self._products is not None, "what it computes was bound"
                self._products.run(work.product, product_rows(rows, self._most_rows[work.rows]))
            return
        grid = work.launch.grid(counts, splits)
        if min(grid) > 0 and not (work.launch.only_split and splits == 1):
            self.device.launch(work.kernel, grid, work.launch.threads, work.launch.shared, work.arguments)

    def _exchange(self, work: Exchange, counts: Counts) -> None:
        raise AssertionError("the plan is a rank's, for which there is CudaRankSession")

    def _outputs(self, bound: Bound, counts: Counts) -> dict[str, Float32]:
        """What a step wrote, as float32."""
        buffers = {buffer.name: buffer for buffer in self._plan.buffers}
        found: dict[str, Float32] = {}
        for name in filter(None, bound.step.outputs):
            buffer = buffers[name]
            rows = counts.tokens if buffer.rows is Rows.TOKENS else counts.logit_rows
            stored = np.empty((rows, buffer.cols), buffer.dtype.storage)
            self.device.fetch(stored, self.addresses.arena + buffer.offset)
            self.device.wait()
            found[name] = to_float32(stored, buffer.dtype)
        return found


class CudaSession(PlanOnGpu):
    """The only rank of an engine: two steps may be under way."""

    def __init__(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, gpu: Gpu) -> None:
        self._submitted: deque[Submitted] = deque()
        self._before: StepBatch | None = None  # the batch that was submitted last
        self._size: int | None = None  # of its graph
        super().__init__(plan, weights, options, gpu)

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence. Raises RequestError for rules or tokens that break the contract, and while steps run."""
        self._require_idle()
        self._sampler.start(slot, rules, tokens, num_prompt)

    def end(self, slot: int) -> None:
        """Forget it."""
        self._sampler.end(slot)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One step. Raises RequestError for a batch that breaks the contract, before anything is computed."""
        self._require_idle()
        self.submit(batch)
        return self.wait()

    def submit(self, batch: StepBatch) -> None:
        """Begin a step, behind one that may run. Raises RequestError as `run` does."""
        if len(self._submitted) == 2:
            raise RequestError("two steps are running already: wait for the first one")
        before, self._before, given = self._before, None, batch
        if self._submitted and before is not None and goes_on(batch, before):  # the step under way draws its tokens
            batch = dataclasses.replace(batch, ids=-1 - batch.slots)
            check_next(batch, before, self._plan, self.num_blocks)
        else:
            batch = self._sampler.complete(batch)
            check_batch(batch, self._plan, self.num_blocks)
            self._size = self._graphs.size(batch)
        draws = self._sampler.of_step(batch)
        self.device.enter()
        self._tables.reverse()
        counts, integers = self._tables[0].fill(batch, self._size)
        self.device.send(self._tables_at, integers)
        self._graphs.run(counts, lambda: self._launch_all(counts))
        self._submitted.append(self._sampler.submit(batch, draws, self._logits_at))
        self._before = given

    def wait(self) -> StepResult:
        """The result of the older of the steps under way."""
        if not self._submitted:
            raise RequestError("wait() was called, but no step was submitted", hint="call submit() first")
        self.device.enter()
        return self._sampler.finish(self._submitted.popleft())

    def drop(self) -> None:
        """Forget the steps under way."""
        self._submitted.clear()
        self._before = None
        with contextlib.suppress(TargetError):  # a fault of the GPU shows in whatever is asked for next
            self.device.enter()
            self.device.wait()

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        self._require_idle()
        batch = self._sampler.complete(batch)
        check_batch(batch, self._plan, self.num_blocks)
        draws = self._sampler.of_step(batch)
        outputs = self._compute_tapped(batch, steps)
        return self._sampler.finish(self._sampler.submit(batch, draws, self._logits_at)), outputs

    def time_work(self, batch: StepBatch, steps: Sequence[str], repetitions: int) -> Mapping[str, float]:
        """Kernel, or "product" for a matmul of cuBLASLt → seconds of one launch in the named plan steps, which do the
        same in several layers: each launch of the first, the second, ... again and again, so that no layer finds its
        weights in the GPU's caches if those of all do not fit. What the buffers hold afterwards has no meaning."""
        self._require_idle()
        check_batch(batch, self._plan, self.num_blocks)
        self.device.enter()
        counts, integers = self._tables[0].fill(batch)
        self.device.send(self._tables_at, integers)
        splits = self._splits(counts)
        alike: dict[str, list[_Prepared]] = {}
        for bound, ready in zip(self._steps, self._ready, strict=True):
            for work in ready if bound.step.name in steps else ():
                name = work.launch.kernel if isinstance(work, _Ready) else "product"
                alike.setdefault(name, []).append(work)
        return {
            name: self.device.seconds(functools.partial(self._launch_alike, works, counts, splits), repetitions)
            / len(works)
            for name, works in alike.items()
        }

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits, on the host."""
        self._require_idle()
        return self._sampler.draw(slots, logits, raw)

    def _require_idle(self) -> None:
        if self._submitted:
            raise RequestError("steps that were submitted have not ended", hint="call wait() for each of them first")

    def _launch_alike(self, alike: Sequence[_Prepared], counts: Counts, splits: int) -> None:
        for work in alike:
            self._launch_work(work, counts, splits)
