"""The targets cpu/avx2, cpu/avx512, cpu/avx512bf16 and cpu/amx: Plan → native Session.

The only door to the module `ingot._cpu`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import CapacityError, EngineError, RequestError, TargetError, UsageError
from ingot.plan import Attr, KvLayout, Plan, Step
from ingot.plugins.cpu.homes import weight_homes
from ingot.plugins.cpu.kv_layout import unpack_keys, unpack_values
from ingot.plugins.cpu.machine import check_memory, processor_name
from ingot.plugins.target import Constant, KernelLimits, Product, Progress, SessionOptions, Target
from ingot.step_io import Float32, Repeat, SampleRows, StepBatch, StepResult, StepTimes
from ingot.weights_memory import Homes, offers_huge_pages

try:
    from ingot import _cpu
except ImportError as error:  # a checkout without the compiled module: `ref` still works
    _why_not: str | None = str(error)
else:
    _why_not = None

# Of all levels, as bind.cpp checks them when a plan is opened. Sizes stay below 2^31, so that their products fit int64.
_LIMITS = KernelLimits(
    head_dim=256, head_dim_multiple=4, heads=4096, layers=65535, extent=(1 << 31) - 1, experts=65535,
    taken_experts=(1 << 31) - 1,
)  # fmt: skip
_LEVELS = ("amx", "avx512bf16", "avx512", "avx2")  # best first; each includes those after it
_ROUNDING_LEVELS = ("amx", "avx512bf16")  # their own products of bf16 and of quantised weights round x to bf16
_TUNING_VERSION = 5  # of the matrix products: advances when their speed or their tactics change
_TIMING_SECONDS = 0.002  # of one product in one way
_PEAK_SECONDS = 0.03
_STREAMED_ROWS = 32  # on tiles: all sums stay there, which leaves no choice
_TILE_TACTICS = ("parts of K", "epilogue apart", "half parts")


def _require_native() -> None:
    if _why_not is not None:
        raise TargetError(
            "ingot's compiled CPU module is not here", got=_why_not, hint="install ingot, or: make native"
        )


@contextlib.contextmanager
def _enough_threads() -> Iterator[None]:
    """Raises TargetError without the module, CapacityError where the system starts no more threads. Those that there
    are stay of use.
    """
    _require_native()
    try:
        yield
    except _cpu.ThreadStartError as error:
        raise CapacityError(
            "the system starts no more threads", got=str(error),
            hint="pass fewer threads, or raise the limit on processes (ulimit -u, pids.max of the control group)",
        ) from error  # fmt: skip


@contextlib.contextmanager
def _contract(problem: str) -> Iterator[None]:
    """Raises RequestError where the native session refuses its arguments, CapacityError for want of threads."""
    try:
        with _enough_threads():
            yield
    except (ValueError, TypeError) as error:
        raise RequestError(problem, got=str(error)) from error


def detect_isa() -> str:
    """The best of amx, avx512bf16, avx512 and avx2 that this machine offers, or "none"."""
    return "none" if _why_not is not None else _cpu.detect_isa()


def kernel_table() -> tuple[str, ...]:
    """Every compiled kernel, those of other machines and the emulated ones of test builds included."""
    return () if _why_not is not None else tuple(_cpu.kernel_names())


def core_count() -> int:
    """Cores that this process may use (affinity, SMT and the control group's quota counted)."""
    _require_native()
    return len(_cpu.cores())


def crc32(data: npt.NDArray[np.uint8], crc: int = 0) -> int:
    """zlib's CRC-32 at memory speed; other Python threads run meanwhile."""
    _require_native()
    return _cpu.crc32(data, crc)


@_enough_threads()
def read_bandwidth(nbytes: int, threads: int | None = None) -> float:
    """Bytes per second that `threads` (default: all cores) read from a buffer of nbytes."""
    return _cpu.read_bandwidth(nbytes, core_count() if threads is None else threads)


def peak_name(kernel: str) -> str:
    """The arithmetic that a kernel of this name is made of, for `live_peak`: "f32.avx2", "int8.amx", ..."""
    _, dtype, isa = kernel.split(".")
    kind = "int8" if dtype.endswith("a8") else "bf16" if isa in _ROUNDING_LEVELS else "f32"
    return f"{kind}.{isa}"


@_enough_threads()
def barrier_seconds(threads: int | None = None) -> float:
    """What it takes `threads` (default: all cores) to wait for each other, one time after another."""
    return _cpu.barrier_seconds(core_count() if threads is None else threads)


@_enough_threads()
def live_peak(name: str, threads: int | None = None) -> float:
    """Operations per second that `threads` (default: all cores) reach on random operands in L1; takes 30 ms."""
    return _cpu.live_peak(name, core_count() if threads is None else threads, _PEAK_SECONDS)


def _draw_tuple(rows: SampleRows) -> "_cpu.Draws":
    """The arrays in the order of their classes' fields."""
    rules, probs = rows.rules, rows.probs
    return (
        rows.row, rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.counter,
        None if rules is None else (
            rules.min_p, rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty,
            rules.history_starts, rules.history, rules.num_prompt, rules.bias_starts, rules.bias_ids, rules.bias,
        ),
        None if probs is None else (probs.given, probs.top_starts), rows.log_probs,
    )  # fmt: skip


def _repeat_tuple(repeat: Repeat) -> "_cpu.Repeat":
    course, probs = repeat.course, repeat.probs
    return (
        float(repeat.seconds), repeat.end_starts, repeat.end_ids,
        None if course is None else (
            course.num_lasting, course.min_steps, course.tails, course.tail_starts, course.bad_words,
            course.bad_word_starts, course.stop_words, course.stop_word_starts,
        ),
        repeat.stop, repeat.ids, repeat.log_probs,
        None if probs is None else (probs.ranks, probs.top_ids, probs.top_log_probs),
        repeat.done,
    )  # fmt: skip


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
        with _contract("the session cannot run this batch"):
            results = self.native.run(
                batch.ids, batch.query_starts, batch.past_lengths, batch.block_tables, batch.logit_rows,
                _draw_tuple(batch.sample), batch.want_logits,
            )  # fmt: skip
        return _step_result(results)

    def decode(self, batch: StepBatch, repeat: Repeat) -> int:
        """One crossing for several steps. Raises RequestError as `run` does."""
        with _contract("the session cannot repeat this batch"):
            return self.native.decode(
                batch.ids, batch.query_starts, batch.past_lengths, batch.block_tables, batch.logit_rows,
                _draw_tuple(batch.sample), _repeat_tuple(repeat),
            )  # fmt: skip

    def steps_done(self, repeat: Repeat) -> int:
        """Never waits for the step that runs."""
        return _cpu.load_acquire(repeat.done)

    def draw(self, logits: Float32, rows: SampleRows) -> StepResult:
        """Draw from given logits. Raises RequestError for draws that break the contract."""
        with _contract("the session cannot draw from these logits"):
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
                parts=np.array(self.native.step_seconds()), left_out=frozenset(self.native.left_out()),
                keys_only=frozenset(self.native.keys_only()), barriers=self.native.barriers,
            )  # fmt: skip
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
        with _contract("the session cannot be closed now"):
            self.native.close()


class CpuTarget:
    """One instruction set level. The compiled module holds the kernels of all levels."""

    packs_products = True
    adds_in_products = True
    on_gpu = False

    def __init__(self, level: str) -> None:
        self.name = f"cpu/{level}"
        self._level = level

    def kernels(self) -> tuple[str, ...]:
        """Kernels of this level, then of the levels that it includes."""
        if _why_not is not None:
            return ()
        names = _cpu.kernel_names()
        included = _LEVELS[_LEVELS.index(self._level) :]
        return tuple(name for level in included for name in names if name.endswith(f".{level}"))

    def limits(self) -> KernelLimits:
        """Kernels of all levels take the same."""
        return _LIMITS

    def activations(self, kernel: str) -> str:
        """AMX tiles and the dot product of bf16 take both factors in bf16, AMX also where weights are quantised."""
        _, dtype, isa = kernel.split(".")
        return "int8" if dtype.endswith("a8") else "bf16" if isa.startswith(_ROUNDING_LEVELS) else "f32"

    def unbuildable(self) -> str | None:
        """Packing needs numpy alone, but only the compiled module knows its kernels."""
        return None if _why_not is None else f"ingot's compiled CPU module is not here: {_why_not}"

    def constants(self, plan: Plan, progress: Progress) -> tuple[Constant, ...]:
        """The kernels lie in the compiled module, not in the engine."""
        return ()

    def tools(self) -> dict[str, str]:
        """Nothing but ingot itself."""
        return {}

    def missing(self, isa: str | None = None) -> str | None:
        """Why not, with the way out. Raises UsageError for an `isa` that is not a level."""
        if isa is not None and isa not in _LEVELS:
            raise UsageError(f"there is no ISA {isa!r}", where="--isa", expected=", ".join(_LEVELS))
        if _why_not is not None:
            return f"ingot's compiled CPU module is not here: {_why_not}"
        offered = (*_LEVELS, "none")
        here = detect_isa()
        usable = here if isa is None else max(here, isa, key=offered.index)
        if offered.index(usable) <= offered.index(self._level):
            return None
        cap = f", capped to {usable} by --isa" if usable != here else ""
        rebuild = "use --target ref" if usable == "none" else f"rebuild with --target cpu/{usable}"
        return (
            f"{self.name} needs {self._level.upper()}; this machine offers {here}{cap}. Next: {rebuild}, or take a "
            f"machine with {self._level.upper()}"
        )

    def kv_memory(self, plan: Plan) -> int | None:
        """The host's."""
        return None

    def machine(self) -> str:
        """Processor, cores and version of the products."""
        return f"{processor_name()}, {core_count()} cores, {detect_isa()}, products {_TUNING_VERSION}"

    def tactics(self, product: Product, rows: int) -> tuple[str, ...]:
        """How threads share the work; of many rows on tiles (AMX) also how they go over K."""
        if product.experts:
            names = ("own panels", "blocks in turn") if rows == 1 else ("as shipped", "otherwise shared")
            return (*names, "whole experts in turn") if product.gated else names
        if rows == 1:
            return "panel by panel", "blocks"
        on_tiles = rows > _STREAMED_ROWS and product.kernel.split(".")[2].startswith("amx")
        return ("as shipped", "other blocks", *(_TILE_TACTICS if on_tiles else ()))

    @_enough_threads()
    def time_product(self, product: Product, rows: int, tactic: int) -> float:
        """Seconds on all cores; the fastest of several calls."""
        if product.experts:
            return _cpu.time_experts(
                product.kernel, rows, product.experts, product.slots, product.n, product.k, product.group,
                product.panel_bytes, tactic, core_count(), _TIMING_SECONDS,
            )  # fmt: skip
        return _cpu.time_matmul(
            product.kernel, rows, product.n, product.k, product.group, product.gated, product.panel_bytes, tactic,
            core_count(), _TIMING_SECONDS,
        )  # fmt: skip

    def homes(self, plan: Plan, threads: int | None) -> Homes | None:
        """2 MiB pages near the cores that read them; None where the system has none and one memory node holds all."""
        _require_native()
        found = weight_homes(plan, _cpu.cores(), _num_threads(threads))
        return found if offers_huge_pages() or len(found.cores) > 1 else None

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> CpuSession:
        """Bind `plan` to this machine. Raises EngineError for a plan that is wrong, TargetError, CapacityError."""
        _require_native()
        if (reason := self.missing()) is not None:
            raise TargetError("this machine cannot run the engine", expected=self.name, got=reason)
        return open_native(plan, weights, options, self._level)


def _num_threads(threads: int | None) -> int:
    """None: one per core."""
    if threads is not None and not 1 <= threads <= 256:
        raise UsageError("threads is out of range", expected="1 to 256", got=str(threads))
    return core_count() if threads is None else threads


@_enough_threads()
def open_native(plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, isa: str) -> CpuSession:
    """A session whose kernels may be of any level up to `isa` (tests also pass the emulated level "avx512emu")."""
    threads = _num_threads(options.threads)
    check_memory(plan, options.num_blocks)
    limits, kv = plan.limits, plan.kv
    try:
        native = _cpu.Session(
            weights=weights,
            buffers=[(each.name, each.rows.value, each.cols, each.offset) for each in plan.buffers],
            weight_specs=[
                (each.name, each.dtype.value, list(each.shape), each.layout, each.nbytes,
                 [(piece.begin, piece.end, piece.offset) for piece in each.pieces])
                for each in plan.weights
            ],
            steps=[_step_tuple(plan, each) for each in plan.steps],
            screen=[_step_tuple(plan, each) for each in plan.screen],
            limits=(plan.vocab_size, plan.max_positions, limits.max_batch_size, limits.max_num_tokens,
                    limits.max_logit_rows),
            kv=(kv.num_layers, kv.kv_heads, kv.head_dim, kv.tokens_per_block, kv.dtype.value, options.num_blocks),
            arena_bytes=plan.arena_bytes,
            logits=plan.logits,
            threads=threads,
            isa=isa,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise EngineError("the engine's plan cannot run", got=str(error), hint="rebuild the engine") from error
    except MemoryError as error:
        raise CapacityError(
            "there is not enough memory for the engine", expected=f"{plan.arena_bytes} bytes of activations and "
            f"{kv.block_bytes * options.num_blocks} bytes of KV cache", hint="pass a smaller kv_cache_memory",
        ) from error  # fmt: skip
    return CpuSession(native, plan.kv, options.num_blocks)


def _step_tuple(plan: Plan, step: Step) -> tuple[str, str, str, list[str], list[str], dict[str, Attr]]:
    """A tuned product's tactics come as one more attribute."""
    tuned: dict[str, Attr] = {"tactics": plan.tactics[step.name]} if step.name in plan.tactics else {}
    return step.name, step.op, step.kernel, list(step.inputs), list(step.outputs), {**step.attrs, **tuned}


TARGETS: tuple[Target, ...] = tuple(CpuTarget(level) for level in _LEVELS)
