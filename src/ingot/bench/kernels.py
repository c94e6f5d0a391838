"""`ingot bench kernels`: where the time of a step goes, op by op, beside what memory and arithmetic allow.

The engine that is served runs as it is served: its own plan, weights, KV blocks and draws. The session notes when each
plan step ends; the limits are measured before and after every phase, on as many threads:

    time of an op ≥ bytes / (what memory gives of a buffer as large as the engine)
                  ≥ operations / (what the instructions of its kernel reach on random operands in L1)
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.bench.latency import check_lengths
from ingot.configs.runtime import runtime_config
from ingot.engine import read_plan
from ingot.errors import TargetError, UsageError
from ingot.fixed_tables import blocks_needed
from ingot.plan import Plan, Step
from ingot.plugins.cpu.native import barrier_seconds, core_count, peak_flops, peak_name, read_bandwidth
from ingot.plugins.plan_work import PlanWork
from ingot.plugins.registry import find_op
from ingot.runtime.session import join_ranks, load_engine
from ingot.step_io import Int32, TimedSession
from ingot.step_work import Work
from ingot.timed_run import TimedRun, TimedStep

BATCH_SIZES = (1, 8, 32)
INPUT_LEN = 512
LEAST_BUFFER = 4096  # bytes
MOST_REPETITIONS = 50
ENOUGH_SECONDS = 1.0  # a phase that took that long, and was repeated as often as asked, ends

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelsOptions:
    """input_len: tokens of the prefill phase; context: how many of them a decode step finds in the KV cache, all unless
    given; batch_sizes: sequences that decode together, a phase each. None takes INPUT_LEN and BATCH_SIZES, lowered to
    the engine's limits. target: of an engine with several.
    """

    engine_dir: Path
    input_len: int | None = None
    context: int | None = None
    batch_sizes: Sequence[int] | None = None
    repetitions: int = 3
    seed: int = 0
    threads: int | None = None
    isa: str | None = None
    target: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpTimes:
    """Plan steps of one kind together, in seconds per repetition.

    share           of the phase
    nbytes          weights, keys and values, and activations, each counted once
    bound           "memory" or "compute": which of the two limits is the higher one
    limit_seconds   no less time is possible by the measured limits; activations that lie in caches may take less
    """

    name: str
    kernel: str
    calls: int
    seconds: float
    share: float
    nbytes: int
    operations: int
    bound: str
    limit_seconds: float
    fraction_of_limit: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """seconds, of the fastest quarter of the repetitions, = those of all `ops` + outside_seconds: handing arguments
    over, waking and joining threads.

    variants         of the plan, that ran; "" stands for the steps one by one
    barriers         how often the threads wait for each other
    barrier_seconds  what that takes them where nobody is late, measured beside this phase
    machine_gbs      read bandwidth of a buffer as large as the engine, beside this phase; peaks: operations per second
    """

    name: str
    sequences: int
    tokens: int
    repetitions: int
    median_seconds: float
    seconds: float
    outside_seconds: float
    tokens_per_second: float
    fraction_of_limit: float
    variants: tuple[str, ...]
    barriers: int
    barrier_seconds: float
    machine_gbs: float
    peaks: dict[str, float]
    ops: tuple[OpTimes, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelsReport:
    """All phases of one run. notes: what the engine's limits left out.

    ranks  of the engine. Ops and limits are the first one's; its collectives last until the others have come, and the
           others rest while the limits are measured
    """

    engine: str
    target: str
    precision: str
    kv_dtype: str
    threads: int
    ranks: int
    buffer_bytes: int
    notes: tuple[str, ...]
    phases: tuple[Phase, ...]


def bench_kernels(options: KernelsOptions, progress: Progress) -> KernelsReport:
    """Prefill, then decode steps of every batch size, after the prompt that the prefill left in the KV cache."""
    shape = _shape(options, read_plan(options.engine_dir))
    config = runtime_config(threads=options.threads, isa=options.isa, target=options.target)
    join_ranks(options.engine_dir, config)
    loaded = load_engine(options.engine_dir, config)
    session, plan, ranks = loaded.session, loaded.engine.plan, loaded.engine.manifest.ranks
    try:
        if not isinstance(session, TimedSession):
            raise TargetError(
                "ingot bench kernels supports CPU targets only",
                where=str(options.engine_dir),
                expected="cpu/avx2, cpu/avxvnni, cpu/avx512, cpu/avx512bf16 or cpu/amx",
                got=loaded.engine.manifest.target,
                hint="build for --target cpu, or take `ingot bench latency`",
            )
        sizes, notes = _fitting(options.batch_sizes, plan, session.num_blocks, shape.length)
        run = TimedRun(session, plan, sequences=max(sizes, default=1), length=shape.length)
        measure = _Measure(plan, options, progress)
        draw = np.random.default_rng(options.seed)

        def random_prompt() -> Int32:
            return draw.integers(0, plan.vocab_size, shape.input_len).astype(np.int32)

        def prefill(_: int) -> list[TimedStep]:
            return run.prefill(random_prompt())

        phases = [measure.phase(f"prefill of {shape.input_len} tokens", prefill, options.repetitions)]
        if ranks == 1:
            run.share_prompt()
        else:  # only the first rank could copy: all of them compute a prompt for each sequence
            for sequence in range(1, max(sizes, default=1)):
                run.prefill(random_prompt(), sequence)
        for size in sizes:
            ids = draw.integers(0, plan.vocab_size, size).astype(np.int32)

            def decode(turn: int, ids: Int32 = ids) -> list[TimedStep]:
                step = run.decode(ids, shape.context + turn)
                ids[:] = np.maximum(step.ids, 0)  # logits that are no numbers leave no token to draw
                return [step]

            name = f"decode of {size} sequence{'s' if size > 1 else ''} after {shape.context} tokens"
            phases.append(measure.phase(name, decode, shape.steps - 1))
    finally:
        session.close()
        loaded.engine.close()
    manifest = loaded.engine.manifest
    return KernelsReport(
        engine=str(options.engine_dir),
        target=manifest.target,
        precision=manifest.precision,
        kv_dtype=plan.caches[0].dtype.value,
        threads=measure.threads,
        ranks=ranks,
        buffer_bytes=measure.buffer_bytes,
        notes=notes,
        phases=tuple(phases),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """steps: of a decode phase, the untimed one included; length: tokens of a sequence at its end."""

    input_len: int
    context: int
    steps: int

    @property
    def length(self) -> int:
        return max(self.input_len, self.context + self.steps)


def _shape(options: KernelsOptions, plan: Plan) -> _Shape:
    """The options, defaults filled in and lowered. Raises UsageError for what the engine cannot hold."""
    longest = min(plan.limits.max_seq_len - 1, plan.max_positions)  # tokens that the KV cache may hold
    least = options.repetitions + 1
    input_len = options.input_len or min(INPUT_LEN, plan.limits.max_input_len, max(1, longest - least))
    check_lengths(plan.limits, input_len=input_len, output_len=1)
    context = options.context or min(input_len, max(1, longest - least))
    if context > input_len:
        raise UsageError(
            "--context is more than --input_len",
            expected=f"at most {input_len} (--input_len)",
            got=str(context),
            hint="give a larger --input_len",
        )
    if context + least > longest:
        raise UsageError(
            "--context and the decode steps together are more than the engine allows",
            expected=f"at most {longest} tokens",
            got=f"--context {context} and {least} steps",
            hint="lower --context or --repetitions",
        )
    return _Shape(input_len=input_len, context=context, steps=min(max(least, MOST_REPETITIONS), longest - context))


def _fitting(
    asked: Sequence[int] | None, plan: Plan, num_blocks: Sequence[int], length: int
) -> tuple[list[int], tuple[str, ...]]:
    """Batch sizes that fit into a step and into the KV cache, and what is said of others. Raises UsageError for those
    that were asked for and do not fit."""
    limits = plan.limits
    one = blocks_needed(plan, sequences=1, length=length)
    room = min(blocks // each for blocks, each in zip(num_blocks, one, strict=True))
    most = min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows, room)
    too_many = [size for size in asked or BATCH_SIZES if size > most]
    if asked and too_many:
        raise UsageError(
            "--batch_size is more than the engine decodes at once",
            expected=f"at most {most}",
            got=", ".join(map(str, too_many)),
            hint="lower it or --context, or build with a larger --max_batch_size",
        )
    notes = tuple(f"{size} sequences are left out: the engine decodes at most {most} at once" for size in too_many)
    return [size for size in asked or BATCH_SIZES if size <= most], notes


class _Measure:
    """Phases of one engine, each between two measurements of the limits."""

    def __init__(self, plan: Plan, options: KernelsOptions, progress: Progress) -> None:
        self.threads = core_count() if options.threads is None else options.threads
        self.buffer_bytes = max(plan.weight_bytes, LEAST_BUFFER)
        self._plan, self._work, self._options, self._progress = plan, PlanWork(plan), options, progress
        self._names = sorted({peak_name(step.kernel) for step in plan.steps})
        self._before = self._limits()

    def _limits(self) -> dict[str, float]:
        """Bytes per second under "", operations per second of each arithmetic."""
        peaks = {name: peak_flops(name, self.threads) for name in self._names}
        return {"": read_bandwidth(self.buffer_bytes, self.threads), **peaks}

    def phase(self, name: str, run: Callable[[int], list[TimedStep]], most: int) -> Phase:
        """`run` once untimed, then until it was repeated often enough, or `most` times."""
        run(0)
        turns: list[list[TimedStep]] = []
        while len(turns) < most:
            self._progress(name, len(turns), most)
            turns.append(run(len(turns) + 1))
            if len(turns) >= self._options.repetitions and sum(map(_seconds, turns)) > ENOUGH_SECONDS:
                break
        self._progress(name, most, most)
        after = self._limits()
        limits = {key: (self._before[key] + after[key]) / 2 for key in after}
        self._before = after
        return summarise(self._plan, self._work, name, turns, limits, barrier_seconds(self.threads))


def fastest_quarter(turns: Sequence[Sequence[TimedStep]]) -> list[Sequence[TimedStep]]:
    """The repetitions that compare with limits, which are the best of several tries; at least one."""
    return sorted(turns, key=_seconds)[: -(-len(turns) // 4)]


def _seconds(turn: Sequence[TimedStep]) -> float:
    return sum(step.seconds for step in turn)


def summarise(
    plan: Plan,
    work: PlanWork,
    name: str,
    turns: Sequence[Sequence[TimedStep]],
    limits: Mapping[str, float],
    barrier: float,
) -> Phase:
    """Means of the fastest quarter, op by op. limits: bytes per second under "", operations per second by name;
    barrier: seconds of one."""
    repetitions, median = len(turns), statistics.median(map(_seconds, turns))
    turns = fastest_quarter(turns)
    seconds = sum(map(_seconds, turns)) / len(turns)
    groups: dict[tuple[str, str], _Sum] = {}
    variants = [plan.variant(name) for name in {timed.times.variant for turn in turns for timed in turn}]
    called = {each.name: each.called() for each in variants}
    inside = {each.name: each.inside() for each in variants}
    for index, step in enumerate(plan.steps):
        counted = [timed for turn in turns for timed in turn if step.name in called[timed.times.variant]]
        if not counted:
            continue
        group = groups.setdefault((op_name(step), step.kernel), _Sum())
        for timed in counted:
            parts = timed.times.parts
            done = work.of(step, timed.load, inside[timed.times.variant])
            group.add(parts[index], done, limits[""], limits[peak_name(step.kernel)])
    draws = groups.setdefault(("sampling", "sample.f32"), _Sum())
    for timed in (timed for turn in turns for timed in turn):
        draws.add(timed.times.parts[-1], work.draw_work(timed.load), limits[""], math.inf)
    ops = [group.times(name, kernel, len(turns), seconds) for (name, kernel), group in groups.items()]
    load = turns[0][-1].load
    tokens = sum(timed.load.tokens for timed in turns[0])
    barriers = sum(timed.times.barriers for timed in turns[0])
    return Phase(
        name=name,
        sequences=len(load.sequences),
        tokens=tokens,
        repetitions=repetitions,
        median_seconds=median,
        seconds=seconds,
        outside_seconds=seconds - sum(op.seconds for op in ops),
        tokens_per_second=tokens / seconds,
        fraction_of_limit=sum(op.limit_seconds for op in ops) / seconds,
        variants=tuple(sorted(called)),
        barriers=barriers,
        barrier_seconds=barriers * barrier,
        machine_gbs=limits[""] / 1e9,
        peaks={key: value for key, value in limits.items() if key},
        ops=tuple(ops),
    )


def op_name(step: Step) -> str:
    """Products by what they compute (qkv, gate_up, lm_head, ...), all else by op."""
    if find_op(step.op).is_matmul:
        return step.name.rsplit("/", 1)[-1].split(".", 1)[0]
    return step.op


class _Sum:
    """Steps of one kind in all repetitions."""

    def __init__(self) -> None:
        self._calls, self._work = 0, Work(nbytes=0, operations=0)
        self._seconds = self._memory = self._compute = self._limit = 0.0

    def add(self, seconds: float, work: Work, bandwidth: float, peak: float) -> None:
        memory, compute = work.nbytes / bandwidth, work.operations / peak
        self._calls += work.nbytes > 0
        self._work += work
        self._seconds += seconds
        self._memory += memory
        self._compute += compute
        self._limit += max(memory, compute)

    def times(self, name: str, kernel: str, repetitions: int, whole: float) -> OpTimes:
        """The times of one repetition, which took `whole` seconds."""
        return OpTimes(
            name=name,
            kernel=kernel,
            calls=self._calls // repetitions,
            seconds=self._seconds / repetitions,
            share=self._seconds / repetitions / whole,
            nbytes=self._work.nbytes // repetitions,
            operations=self._work.operations // repetitions,
            bound="compute" if self._compute > self._memory else "memory",
            limit_seconds=self._limit / repetitions,
            fraction_of_limit=self._limit / self._seconds if self._seconds else 0.0,
        )
