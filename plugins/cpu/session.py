"""Plan → session of the compiled module, behind the contract that the runtime knows."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import CapacityError, EngineError
from ingot.plan import Attr, KvLayout, Plan, Step
from ingot.plugins.cpu.kv_layout import unpack_keys, unpack_values
from ingot.plugins.cpu.machine import check_memory
from ingot.plugins.cpu.native import _cpu, contract, enough_threads, num_threads
from ingot.plugins.target import SessionOptions
from ingot.step_io import Float32, Repeat, SampleRows, StepBatch, StepResult, StepTimes


def _draw_tuple(rows: SampleRows) -> "_cpu.Draws":
    """The arrays in the order of their classes' fields."""
    rules, probs = rows.rules, rows.probs
    return (
        rows.row,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.seed,
        rows.counter,
        None
        if rules is None
        else (
            rules.min_p,
            rules.repetition_penalty,
            rules.frequency_penalty,
            rules.presence_penalty,
            rules.history_starts,
            rules.history,
            rules.num_prompt,
            rules.bias_starts,
            rules.bias_ids,
            rules.bias,
        ),
        None if probs is None else (probs.given, probs.top_starts),
        rows.log_probs,
    )


def _repeat_tuple(repeat: Repeat) -> "_cpu.Repeat":
    course, probs = repeat.course, repeat.probs
    return (
        float(repeat.seconds),
        repeat.end_starts,
        repeat.end_ids,
        None
        if course is None
        else (
            course.num_lasting,
            course.min_steps,
            course.tails,
            course.tail_starts,
            course.bad_words,
            course.bad_word_starts,
            course.stop_words,
            course.stop_word_starts,
        ),
        repeat.stop,
        repeat.ids,
        repeat.log_probs,
        None if probs is None else (probs.ranks, probs.top_ids, probs.top_log_probs),
        repeat.done,
    )


def _step_result(results: "_cpu.Drawn") -> StepResult:
    ids, log_probs, logits, ranks, top_ids, top_log_probs = results
    return StepResult(
        ids=ids, log_probs=log_probs, logits=logits, ranks=ranks, top_ids=top_ids, top_log_probs=top_log_probs
    )


class CpuSession:
    """A native session behind the runtime's contract. native: the session itself, with its hooks for tests."""

    def __init__(self, native: "_cpu.Session", kv: KvLayout, num_blocks: int) -> None:
        self.native = native
        self.num_blocks = num_blocks
        self._kv = kv

    def run(self, batch: StepBatch) -> StepResult:
        """One crossing. Raises RequestError for a batch that breaks the contract, before anything is computed."""
        with contract("the session cannot run this batch"):
            results = self.native.run(
                batch.ids,
                batch.query_starts,
                batch.past_lengths,
                batch.block_tables,
                batch.logit_rows,
                _draw_tuple(batch.sample),
                batch.want_logits,
            )
        return _step_result(results)

    def decode(self, batch: StepBatch, repeat: Repeat) -> int:
        """One crossing for several steps. Raises RequestError as `run` does."""
        with contract("the session cannot repeat this batch"):
            return self.native.decode(
                batch.ids,
                batch.query_starts,
                batch.past_lengths,
                batch.block_tables,
                batch.logit_rows,
                _draw_tuple(batch.sample),
                _repeat_tuple(repeat),
            )

    def draw(self, logits: Float32, rows: SampleRows) -> StepResult:
        """Draw from given logits. Raises RequestError for draws that break the contract."""
        with contract("the session cannot draw from these logits"):
            return _step_result(self.native.draw(logits, _draw_tuple(rows)))

    def run_tapped(
        self, batch: StepBatch, steps: Sequence[str]
    ) -> tuple[StepResult, Mapping[str, Mapping[str, Float32]]]:
        """`run`, and what each of the named plan steps wrote: step → buffer → [rows, cols]."""
        self.native.tap(steps)
        try:
            result = self.run(batch)
        finally:
            tapped = self.native.take_tapped()
            self.native.tap([])
        outputs: dict[str, dict[str, Float32]] = {}
        for step, buffer, values in tapped:
            outputs.setdefault(step, {})[buffer] = values
        return result, outputs

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

    def copy_block(self, source: int, target: int) -> None:
        """Give a KV block the contents of another one, in all layers."""
        for layer in range(self._kv.num_layers):
            for values in (False, True):
                self.native.write_kv(layer, target, values, self.native.read_kv(layer, source, values))

    def read_kv(self, layer: int, block: int) -> tuple[Float32, Float32]:
        """Keys and values of a block, those of an int8 cache times their scales."""
        keys, key_scales = unpack_keys(self.native.read_kv(layer, block, False), self._kv)
        values, value_scales = unpack_values(self.native.read_kv(layer, block, True), self._kv)
        return keys * key_scales[..., None], values[..., : self._kv.head_dim] * value_scales[..., None]

    def slow_down(self, seconds_per_step: float) -> None:
        """Makes every plan step last longer, for tests of streaming."""
        self.native.set_step_delay(seconds_per_step)

    def close(self) -> None:
        """Give arena and KV memory back. Raises RequestError in a signal handler in the middle of a step."""
        with contract("the session cannot be closed now"):
            self.native.close()


@enough_threads()
def open_native(plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, isa: str) -> CpuSession:
    """A session whose kernels may be of any level up to `isa` (tests also pass the emulated level "avx512emu")."""
    threads = num_threads(options.threads)
    check_memory(plan, options.num_blocks)
    limits, kv = plan.limits, plan.kv
    try:
        native = _cpu.Session(
            weights=weights,
            buffers=[(each.name, each.rows.value, each.cols, each.offset) for each in plan.buffers],
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
            screen=[_step_tuple(plan, each) for each in plan.screen],
            variants=[
                (
                    each.name,
                    each.most_tokens,
                    [(call.step, list(call.inside), call.private, call.waits) for call in each.calls],
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
            kv=(kv.num_layers, kv.kv_heads, kv.head_dim, kv.tokens_per_block, kv.dtype.value, options.num_blocks),
            arena_bytes=plan.arena_bytes,
            logits=plan.logits,
            threads=threads,
            isa=isa,
        )
    except (ValueError, TypeError) as error:
        raise EngineError("the engine's plan cannot run", got=str(error), hint="rebuild the engine") from error
    except MemoryError as error:
        raise CapacityError(
            "there is not enough memory for the engine",
            expected=f"{plan.arena_bytes} bytes of activations and "
            f"{kv.block_bytes * options.num_blocks} bytes of KV cache",
            hint="pass a smaller kv_cache_memory",
        ) from error
    return CpuSession(native, plan.kv, options.num_blocks)


def _step_tuple(plan: Plan, step: Step) -> tuple[str, str, str, list[str], list[str], dict[str, Attr]]:
    """A tuned product's tactics come as one more attribute."""
    tuned: dict[str, Attr] = {"tactics": plan.tactics[step.name]} if step.name in plan.tactics else {}
    return step.name, step.op, step.kernel, list(step.inputs), list(step.outputs), {**step.attrs, **tuned}
