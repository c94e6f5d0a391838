"""Plan → session of the compiled module, behind the contract that the runtime knows."""

import atexit
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import CapacityError, EngineError, IngotError
from ingot.plan import Attr, CacheGroup, Plan, Step
from ingot.plugins.cpu.kv_layout import unpack_keys, unpack_rows, unpack_values
from ingot.plugins.cpu.machine import check_memory, pool_bytes
from ingot.plugins.cpu.native import _cpu, contract, enough_threads, num_threads
from ingot.plugins.cpu.rank_blocks import RankBlocks
from ingot.plugins.cpu.ranks import rank_errors
from ingot.plugins.target import RankLink, SessionOptions
from ingot.step_io import Ahead, Float32, Grammar, Int32, SequenceRules, StepBatch, StepResult, StepTimes

MOST_STEPS = 128  # of a run: few enough that the blocks which are reserved ahead are few too


def _rules_tuple(rules: SequenceRules) -> "_cpu.Rules":
    """In the order of the class's fields."""
    return (
        float(rules.temperature),
        rules.top_k,
        float(rules.top_p),
        float(rules.min_p),
        rules.seed,
        float(rules.repetition_penalty),
        float(rules.frequency_penalty),
        float(rules.presence_penalty),
        rules.logit_bias,
        rules.bad_words,
        rules.stop_words,
        rules.end_ids,
        rules.min_tokens,
        rules.max_tokens,
        rules.log_prob,
        -1 if rules.top is None else rules.top,
        rules.reasoning_end,
        -1 if rules.reasoning_begin is None else rules.reasoning_begin,
        -1 if rules.reasoning_budget is None else rules.reasoning_budget,
        None if rules.grammar is None else rules.grammar.native,
    )


def _step_result(results: "_cpu.Drawn") -> StepResult:
    ids, log_probs, ends, logits, token_ranks, top_ids, top_log_probs = results
    return StepResult(
        ids=ids,
        log_probs=log_probs,
        ends=ends,
        logits=logits,
        token_ranks=token_ranks,
        top_ids=top_ids,
        top_log_probs=top_log_probs,
    )


class CpuSession:
    """A native session behind the runtime's contract. native: the session itself, with its hooks for tests."""

    most_steps = MOST_STEPS
    takes_drafts = True

    def __init__(self, native: "_cpu.Session", caches: tuple[CacheGroup, ...], num_blocks: tuple[int, ...]) -> None:
        self.native = native
        self.num_blocks = num_blocks
        self.caches = caches
        self._grammars: dict[int, Grammar] = {}  # by slot: the native sequences only know where they are

    def start(self, slot: int, rules: SequenceRules, tokens: Int32, num_prompt: int) -> None:
        """Hold a sequence. Raises RequestError for rules or tokens that break the contract."""
        with contract("the session cannot hold this sequence"):
            self.native.start(slot, _rules_tuple(rules), tokens, num_prompt)
        if rules.grammar is not None:
            self._grammars[slot] = rules.grammar
        else:
            self._grammars.pop(slot, None)

    def end(self, slot: int) -> None:
        """Forget it."""
        with contract("the session cannot forget a sequence now"):
            self.native.end(slot)
        self._grammars.pop(slot, None)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """One crossing. Raises RequestError for a batch that breaks the contract, before anything is computed."""
        known = batch.known
        with contract("the session cannot run this batch"):
            results = self.native.run(
                batch.ids,
                batch.query_starts,
                batch.past_lengths,
                batch.block_tables,
                batch.logit_rows,
                batch.slots,
                batch.draws,
                None if known is None else (known.row, known.token, known.top),
                batch.want_logits,
                None if ahead is None else (ahead.most_steps, float(ahead.seconds), ahead.stop),
            )
        return _step_result(results)

    def draw(self, slots: Int32, logits: Float32, raw: Float32) -> StepResult:
        """Draw from given logits. Raises RequestError for draws that break the contract."""
        with contract("the session cannot draw from these logits"):
            return _step_result(self.native.draw(slots, logits, raw))

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        outputs: dict[str, dict[str, Float32]] = {}
        with self._tapped(steps, outputs):
            result = self.run(batch)
        return result, outputs

    @contextlib.contextmanager
    def _tapped(self, steps: Sequence[str], outputs: dict[str, dict[str, Float32]]) -> Iterator[None]:
        """outputs: gets what these steps write inside."""
        self.native.tap(steps)
        try:
            yield
        finally:
            tapped = self.native.drain_tapped()
            self.native.tap([])
        for step, buffer, values in tapped:
            outputs.setdefault(step, {})[buffer] = values

    def run_timed(self, batch: StepBatch) -> tuple[StepResult, StepTimes]:
        """`run`, and where its time went."""
        self.native.time_steps(True)
        try:
            result = self.run(batch)
            times = StepTimes(
                parts=np.array(self.native.step_seconds()), variant=self.native.variant, barriers=self.native.barriers
            )
            return result, times
        finally:
            self.native.time_steps(False)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Give a block of a cache group the contents of another one, in all its layers."""
        alone = self.caches[group].state or self.caches[group].latent
        parts = (False,) if alone else (False, True)
        for layer, values in itertools.product(self.caches[group].layers, parts):
            self.native.write_kv(layer, target, values, self.native.read_kv(layer, source, values))

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values of a block, those of an int8 cache times their scales."""
        group = next(each for each in self.caches if layer in each.layers)
        if group.latent:
            rows = unpack_rows(self.native.read_kv(layer, block, False), group)
            return rows, rows[..., : group.latent]
        keys, key_scales = unpack_keys(self.native.read_kv(layer, block, False), group)
        values, value_scales = unpack_values(self.native.read_kv(layer, block, True), group)
        return keys * key_scales[..., None], values[..., : group.head_dim] * value_scales[..., None]

    def block_bytes(self, group: int) -> int:
        """See `BlockSession`."""
        return self.native.block_bytes(group)

    def read_block(self, group: int, block: int, to: npt.NDArray[np.uint8]) -> None:
        """See `BlockSession`. Raises RequestError."""
        with contract("the session cannot read this KV block"):
            self.native.read_block(group, block, to)

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """See `BlockSession`. Raises RequestError."""
        with contract("the session cannot write this KV block"):
            self.native.write_block(group, block, data)

    def slow_down(self, seconds_per_step: float) -> None:
        """Makes every plan step last longer, for tests of streaming."""
        self.native.set_step_delay(seconds_per_step)

    def close(self) -> None:
        """Give arena and KV memory back. Raises RequestError in a signal handler in the middle of a step."""
        with contract("the session cannot be closed now"):
            self.native.close()


class CpuRankSession(CpuSession):
    """That of one of several ranks, whose processes meet in a group. blocks: those of the whole model."""

    def __init__(
        self, alone: CpuSession, group: "_cpu.RankGroup", link: RankLink, stages: int, blocks: RankBlocks
    ) -> None:
        super().__init__(alone.native, alone.caches, alone.num_blocks)
        self._group: _cpu.RankGroup | None = group
        self._stages, self._blocks = stages, blocks
        self._link = link
        atexit.register(self._leave)  # others would wait for a process that takes its time to end

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        """With the other ranks. Raises RankError where one of them is lost."""
        with rank_errors():
            return super().run(batch, ahead)

    @property
    def stages(self) -> int:
        """Pipeline stages, which may compute as many steps at once."""
        return self._stages

    def announce(self, batch: StepBatch) -> None:
        """See `PipelineSession`. Raises RequestError for a batch that breaks the contract, RankError."""
        with rank_errors(), contract("the session cannot run this batch"):
            self.native.announce(
                batch.ids, batch.query_starts, batch.past_lengths, batch.block_tables, batch.logit_rows, batch.slots
            )

    def settle(self) -> None:
        """See `PipelineSession`. Raises RankError."""
        with rank_errors(), contract("the session cannot end its steps"):
            self.native.settle()

    def follow(self) -> None:
        """Compute the first rank's steps until it closes. Raises RankError."""
        with rank_errors(), contract("the session cannot follow the first rank"):
            self.native.follow()

    def follow_tapped(self, steps: Sequence[str]) -> Mapping[str, Mapping[str, Float32]]:
        """Compute one step of the first rank's. Raises RankError."""
        outputs: dict[str, dict[str, Float32]] = {}
        with rank_errors(), contract("the session cannot follow the first rank"), self._tapped(steps, outputs):
            self.native.follow(1)
        return outputs

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of the whole model."""
        return self._blocks.nbytes(group)

    def read_block(self, group: int, block: int, to: npt.NDArray[np.uint8]) -> None:
        """Collect the parts of all ranks, while no announced step is under way. Raises RequestError, RankError."""
        parts = self._blocks.parts(group)
        with rank_errors(), contract("the session cannot read this KV block"):
            self.native.read_ranks_block(group, block, parts)
        self._blocks.join(group, parts, to)

    def write_block(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Give each rank its part, as `read_block` collects it. Raises RequestError, RankError."""
        parts = self._blocks.cut(group, data)
        with rank_errors(), contract("the session cannot write this KV block"):
            self.native.write_ranks_block(group, block, parts)

    def require_ranks(self) -> None:
        """Raises RankError where a rank has ended or failed."""
        group = self._group  # another thread may close the session
        with rank_errors():
            if group is not None:
                group.require_all()

    def close(self) -> None:
        """The first rank's: the others stop following."""
        super().close()
        atexit.unregister(self._leave)
        if self._group is not None and not self._group.failed:
            self._link.leave()
        self._group = None

    def _leave(self) -> None:
        with contextlib.suppress(IngotError):
            self.close()


@enough_threads()
def open_native(
    plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, isa: str, group: "_cpu.RankGroup | None" = None
) -> CpuSession:
    """A session whose kernels may be of any level up to `isa` (tests also pass the emulated level "avx512emu"). group:
    the ranks that compute the plan together."""
    threads = num_threads(options.threads)
    check_memory(plan, options.num_blocks)
    limits = plan.limits
    try:
        native = _cpu.Session(
            weights=weights,
            inputs=[(each.name, each.dtype.value, each.extent.value) for each in plan.inputs],
            buffers=[(each.name, each.rows.value, each.cols, each.offset, each.dtype.value) for each in plan.buffers],
            weight_specs=[
                (
                    each.name,
                    each.dtype.value,
                    list(each.shape),
                    each.layout,
                    each.nbytes,
                    [(piece.begin, piece.end, piece.offset) for piece in each.pieces],
                )
                for each in plan.weights
            ],
            steps=[_step_tuple(plan, each) for each in plan.steps],
            variants=[
                (
                    each.name,
                    each.most_tokens,
                    [
                        (call.step, list(call.inside), call.kv_only, call.private, call.reads_private, call.waits)
                        for call in each.calls
                    ],
                )
                for each in plan.variants
            ],
            limits=(
                plan.vocab_size,
                plan.max_positions,
                limits.max_batch_size,
                limits.max_num_tokens,
                limits.max_logit_rows,
            ),
            caches=[_cache_tuple(*each) for each in zip(plan.caches, options.num_blocks, strict=True)],
            arena_bytes=plan.arena_bytes,
            logits=plan.logits,
            draw_kernel=plan.draw_kernel,
            threads=threads,
            isa=isa,
            group=group,
        )
    except (ValueError, TypeError) as error:
        raise EngineError("the engine's plan is invalid", got=str(error), hint="rebuild the engine") from error
    except MemoryError as error:
        raise CapacityError(
            "there is not enough memory for the engine",
            expected=f"{plan.arena_bytes} bytes of activations and "
            f"{pool_bytes(plan, options.num_blocks)} bytes of KV cache",
            hint="pass a smaller kv_cache_memory",
        ) from error
    return CpuSession(native, plan.caches, options.num_blocks)


def _cache_tuple(group: CacheGroup, num_blocks: int) -> tuple[int, list[int], int, int, int, str, int, list[int], int]:
    sizes = group.kv_heads, group.head_dim, group.tokens_per_block
    return group.window, list(group.layers), *sizes, group.dtype.value, num_blocks, list(group.state), group.latent


def _step_tuple(plan: Plan, step: Step) -> tuple[str, str, str, list[str], list[str], dict[str, Attr]]:
    """A tuned product's tactics come as one more attribute."""
    tuned: dict[str, Attr] = {"tactics": plan.tactics[step.name]} if step.name in plan.tactics else {}
    return step.name, step.op, step.kernel, list(step.inputs), list(step.outputs), {**step.attrs, **tuned}
