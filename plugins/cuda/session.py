"""An engine on a GPU: memory, one upload per step, launches or a graph of them, and the draws.

    batch ─tables▶ device ─▶ embed ▶ ... ▶ logits ─▶ draws

Tokens are drawn on the device, but on the host, from copied logits, where a draw has rules (penalties, biases, min-p)
or wants more probabilities than its own.

Decode steps (one token of every sequence, all logits wanted) run as CUDA graphs, one per bucket of batch sizes: the
first step of a bucket runs launch by launch, the second one is captured. Idle rows of a bucket write to a spare block.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, to_float32
from ingot.plan import Plan, Rows
from ingot.plugins.cuda.bind import bind, code_weight, group_of, scratch_bytes, specialisation
from ingot.plugins.cuda.gpu import Arguments, Device, Gpu, Kernel
from ingot.plugins.cuda.products import WORKSPACE_BYTES, Products
from ingot.plugins.cuda.shapes import attention_tiles, batch_buckets, partial_rows, split_count
from ingot.plugins.cuda.step_tables import Counts, StepTables, TableLayout, check_batch
from ingot.plugins.cuda.work import Addresses, Bound, Launch, Multiply, cache_places, draw_arguments
from ingot.plugins.ops.sample import sample
from ingot.plugins.target import SessionOptions
from ingot.step_io import Float32, SampleRows, StepBatch, StepResult

_INT = 4
_DRAW_THREADS = 512


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A launch with its kernel and arguments in place."""

    launch: Launch
    kernel: Kernel
    arguments: Arguments


class CudaSession:
    """One plan on one GPU.

    num_blocks  of the KV pool, without the spare one
    device, addresses  where everything lies, for those who look into it
    """

    def __init__(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, gpu: Gpu) -> None:
        self.num_blocks = options.num_blocks
        self._plan, self._gpu = plan, gpu
        self.device = Device(gpu)
        try:
            self._open(plan, weights)
        except BaseException:
            self.device.close()
            raise

    def _open(self, plan: Plan, weights: npt.NDArray[np.uint8]) -> None:
        device, kv = self.device, plan.kv
        tiles = attention_tiles(group_of(plan))
        layout, scratch = TableLayout.of(plan, tiles), scratch_bytes(plan)
        tables = device.allocate(_INT * layout.total)
        rows = partial_rows(self._gpu.multiprocessors)
        self.addresses = Addresses(
            weights=device.allocate(weights.nbytes), arena=device.allocate(plan.arena_bytes),
            kv=device.allocate(kv.block_bytes * (self.num_blocks + 1)), num_blocks=self.num_blocks + 1,
            sums=device.allocate(scratch.sums), inputs=device.allocate(scratch.inputs),
            partial=device.allocate(4 * rows * kv.head_dim), stats=device.allocate(8 * rows),
            tables={name: tables + _INT * offset for name, offset in layout.offsets.items()}, table_width=layout.width,
        )  # fmt: skip
        device.upload(self.addresses.weights, weights)
        self._tables_at = tables
        self._tables = StepTables(layout, device.pinned(_INT * layout.total), tiles)
        self._draws = device.pinned(2 * _INT * plan.limits.max_logit_rows)
        self._draws_at = device.allocate(2 * _INT * plan.limits.max_logit_rows)
        self._products = Products(device.allocate(WORKSPACE_BYTES), device.stream_address)
        code = code_weight(plan)
        (piece,) = code.pieces
        module = device.load(weights[piece.offset : piece.offset + code.nbytes])
        self._steps = bind(plan, self.addresses)
        self._kernels = self._load_kernels(module)
        self._ready = [[self._prepared(each) for each in bound.work] for bound in self._steps]
        logits = next(buffer for buffer in plan.buffers if buffer.name == plan.logits)
        self._logits_at = self.addresses.arena + logits.offset
        limits = plan.limits
        self._buckets = batch_buckets(min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows))
        self._graphs: dict[int, Any] = {}
        self._seen: set[int] = set()

    def _load_kernels(self, module: Any) -> dict[str, Kernel]:
        wanted = {"draw_tokens": 0}
        for bound in self._steps:
            for each in bound.work:
                if isinstance(each, Launch):
                    wanted[each.kernel] = max(each.shared, wanted.get(each.kernel, 0))
        return {name: self.device.kernel(module, name, shared) for name, shared in wanted.items()}

    def _prepared(self, work: Launch | Multiply) -> _Ready | Multiply:
        if isinstance(work, Multiply):
            return work
        return _Ready(launch=work, kernel=self._kernels[work.kernel], arguments=Arguments(work.arguments))

    def run(self, batch: StepBatch) -> StepResult:
        """One step. Raises RequestError for a batch that breaks the contract, before anything is computed."""
        check_batch(batch, self._plan, self.num_blocks)
        self.device.enter()
        bucket = self._bucket(batch)
        counts, integers = self._tables.fill(batch, bucket, spare_block=self.num_blocks)
        self.device.send(self._tables_at, integers)
        if bucket is None:
            self._launch_all(counts, self._splits(counts, counts.longest))
        else:
            self._decode(bucket, counts)
        return self._result(batch)

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        check_batch(batch, self._plan, self.num_blocks)
        self.device.enter()
        counts, integers = self._tables.fill(batch)
        self.device.send(self._tables_at, integers)
        splits = self._splits(counts, counts.longest)
        outputs: dict[str, dict[str, Float32]] = {}
        for index, bound in enumerate(self._steps):
            self._launch_step(index, counts, splits)
            if bound.step.name in steps:
                outputs[bound.step.name] = self._outputs(bound, counts)
        return self._result(batch), outputs

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values of a block, each [kv_heads, tokens_per_block, head_dim]."""
        kv = self._plan.kv
        self.device.enter()
        found: list[Float32] = []
        for place, block_bytes, dim in zip(
            cache_places(kv, self.addresses, layer), (kv.k_block_bytes, kv.v_block_bytes), (kv.head_dim, kv.padded_dim),
            strict=True,
        ):  # fmt: skip
            stored = np.empty((kv.kv_heads, kv.tokens_per_block, dim), kv.dtype.storage)
            self.device.fetch(stored, place + block * block_bytes)
            self.device.wait()
            found.append(to_float32(stored, kv.dtype)[..., : kv.head_dim])
        return found[0], found[1]

    def draw(self, logits: Float32, rows: SampleRows) -> StepResult:
        """Draw from given logits, on the host."""
        return sample(logits, rows)

    def close(self) -> None:
        """Give the GPU's memory back."""
        self.device.enter()
        self.device.wait()
        self._products.close()
        self.device.close()

    def _bucket(self, batch: StepBatch) -> int | None:
        """The size that a decode step is filled up to; None for every other step."""
        sequences = len(batch.past_lengths)
        if len(batch.ids) != sequences or not np.array_equal(batch.logit_rows, np.arange(sequences)):
            return None
        return next((bucket for bucket in self._buckets if bucket >= sequences), None)

    def _splits(self, counts: Counts, longest: int) -> int:
        return split_count(counts.decode, self._plan.kv.kv_heads, longest, self._gpu.multiprocessors)

    def _decode(self, bucket: int, counts: Counts) -> None:
        """Splits of a bucket are those of its longest possible sequence, so that one graph serves every length."""
        splits = self._splits(counts, self._plan.limits.max_seq_len)
        if bucket not in self._seen:  # libraries load what they need on first use, which a capture forbids
            self._seen.add(bucket)
            self._launch_all(counts, splits)
            return
        if bucket not in self._graphs:
            self.device.begin_capture()
            self._launch_all(counts, splits)
            self._graphs[bucket] = self.device.end_capture()
        self.device.replay(self._graphs[bucket])

    def _launch_all(self, counts: Counts, splits: int) -> None:
        for index in range(len(self._ready)):
            self._launch_step(index, counts, splits)

    def _launch_step(self, index: int, counts: Counts, splits: int) -> None:
        for work in self._ready[index]:
            if isinstance(work, Multiply):
                rows = counts.tokens if work.rows is Rows.TOKENS else counts.rows
                if rows:
                    self._products.run(work.product, rows)
                continue
            grid = work.launch.grid(counts, splits)
            if min(grid) > 0 and not (work.launch.only_split and splits == 1):
                self.device.launch(work.kernel, grid, work.launch.threads, work.launch.shared, work.arguments)

    def _result(self, batch: StepBatch) -> StepResult:
        rows, draws = len(batch.logit_rows), batch.sample
        plain = draws.rules is None and draws.probs is None and 0 < len(draws.row) <= self._plan.limits.max_logit_rows
        wanted = batch.want_logits or (not plain and len(draws.row) > 0)
        logits = np.empty((rows, self._plan.vocab_size), np.float32)
        if wanted:
            self.device.fetch(logits, self._logits_at)
        drawn = self._draw(len(draws.row)) if plain else None
        self.device.wait()
        if drawn is None:
            drawn = sample(logits, draws)
        else:
            drawn = dataclasses.replace(drawn, ids=drawn.ids.copy(), log_probs=drawn.log_probs.copy())
        return dataclasses.replace(drawn, logits=logits) if batch.want_logits else drawn

    def _draw(self, count: int) -> StepResult:
        """Ids and log probabilities of the first `count` draws, there after `wait`."""
        ids_at, half = self._draws_at, _INT * self._plan.limits.max_logit_rows
        places = (ids_at, ids_at + half, self._logits_at)
        arguments = Arguments(draw_arguments(*places, self.addresses, self._plan.vocab_size))
        self.device.launch(self._kernels["draw_tokens"], (count, 1, 1), _DRAW_THREADS, 0, arguments)
        ids = self._draws[: _INT * count].view(np.int32)
        log_probs = self._draws[half : half + _INT * count].view(np.float32)
        self.device.fetch(ids, ids_at)
        self.device.fetch(log_probs, ids_at + half)
        return StepResult(ids=ids, log_probs=log_probs)

    def _outputs(self, bound: Bound, counts: Counts) -> dict[str, Float32]:
        """What a step wrote, as float32."""
        buffers = {buffer.name: buffer for buffer in self._plan.buffers}
        found: dict[str, Float32] = {}
        for name, narrow in zip(bound.step.outputs, bound.narrow, strict=True):
            if not name:
                continue
            buffer, dtype = buffers[name], specialisation(self._plan).weight if narrow else DType.F32
            rows = counts.tokens if buffer.rows is Rows.TOKENS else counts.rows
            stored = np.empty((rows, buffer.cols), dtype.storage)
            self.device.fetch(stored, self.addresses.arena + buffer.offset)
            self.device.wait()
            found[name] = to_float32(stored, dtype)
        return found
