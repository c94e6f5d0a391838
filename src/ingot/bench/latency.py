"""`ingot bench latency`: TTFT, TPOT and ITL of fixed batches, medians over repetitions."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.bench.bytes_read import best_rows, decode_bytes, machine_bandwidth, weight_bytes_per_step
from ingot.bench.timing import GREEDY, Round, random_prompts, time_requests
from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sampling import SamplingParams
from ingot.engine import read_manifest
from ingot.errors import UsageError
from ingot.plan import Limits, Plan
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import join_ranks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatencyOptions:
    """warmup: untimed rounds before the timed ones; every round gives all requests of a batch at once.

    sampling  of every request; its max_tokens is output_len
    """

    engine_dir: Path
    batch_sizes: Sequence[int] = (1,)
    input_len: int = 128
    output_len: int = 64
    warmup: int = 1
    repetitions: int = 5
    seed: int = 0
    sampling: SamplingParams = GREEDY
    threads: int | None = None
    isa: str | None = None
    target: str | None = None
    use_mmap: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchLatency:
    """Medians over repetitions and requests, in milliseconds; itl_ms: the median gap of each token position.

    tokens_per_second   generated tokens of the whole batch from the first request's start to the last one's end
    bandwidth_gbs       bytes that a decode step must read (weights, keys, values), over TPOT
    bandwidth_fraction  of what this machine reads, measured in the same run
    """

    batch_size: int
    ttft_ms: float
    tpot_ms: float | None
    itl_ms: tuple[float, ...]
    tokens_per_second: float
    bandwidth_gbs: float | None
    bandwidth_fraction: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatencyReport:
    """machine_gbs: bandwidth of the memory of `target`, with a buffer of `buffer_bytes`, the weights a step reads."""

    engine: str
    target: str
    input_len: int
    output_len: int
    repetitions: int
    machine_gbs: float
    buffer_bytes: int
    batches: tuple[BatchLatency, ...]


def bench_latency(options: LatencyOptions, progress: Callable[[str, int, int], None]) -> LatencyReport:
    """Measure every batch size in turn; the machine's bandwidth is read in between, in the same process."""
    limits = read_manifest(options.engine_dir).limits
    check_lengths(limits, input_len=options.input_len, output_len=options.output_len)
    if (most := max(options.batch_sizes)) > limits.max_batch_size:
        raise UsageError(
            "--batch_size is more than the engine runs at once",
            expected=f"at most {limits.max_batch_size}",
            got=str(most),
            hint="lower it, or build with a larger --max_batch_size",
        )
    config = RuntimeConfig(threads=options.threads, isa=options.isa, target=options.target, use_mmap=options.use_mmap)
    join_ranks(options.engine_dir, config)
    with ModelRunner.from_dir(
        options.engine_dir, threads=options.threads, isa=options.isa, target=options.target, use_mmap=options.use_mmap
    ) as runner:
        return _measure(runner, options, progress)


def _measure(runner: ModelRunner, options: LatencyOptions, progress: Callable[[str, int, int], None]) -> LatencyReport:
    plan, target = runner.engine.plan, runner.engine.manifest.target
    buffer_bytes = weight_bytes_per_step(plan)
    machine, batches = [machine_bandwidth(target, buffer_bytes, options.threads) / 1e9], []
    for batch_size in options.batch_sizes:
        rounds: list[Round] = []
        total = options.warmup + options.repetitions
        for index in range(total):
            progress(f"batch {batch_size}", index, total)
            prompts = random_prompts(batch_size, options.input_len, plan.vocab_size, options.seed, batch_size, index)
            measured = time_requests(runner, prompts, options.output_len, options.sampling)
            if index >= options.warmup:
                rounds.append(measured)
        progress(f"batch {batch_size}", total, total)
        machine.append(machine_bandwidth(target, buffer_bytes, options.threads) / 1e9)
        batches.append((batch_size, rounds))
    machine_gbs = statistics.median(machine)
    return LatencyReport(
        engine=str(options.engine_dir),
        target=target,
        input_len=options.input_len,
        output_len=options.output_len,
        repetitions=options.repetitions,
        machine_gbs=machine_gbs,
        buffer_bytes=buffer_bytes,
        batches=tuple(summarise(plan, options, size, rounds, machine_gbs) for size, rounds in batches),
    )


def summarise(
    plan: Plan, options: LatencyOptions, batch_size: int, rounds: Sequence[Round], machine_gbs: float
) -> BatchLatency:
    """Medians of the timed rounds of one batch size."""
    requests = [times for one in rounds for times in one.requests]
    tpots = [times.tpot for times in requests if times.tpot is not None]
    gaps = [statistics.median(column) for column in zip(*(times.gaps for times in requests), strict=True)]
    tpot = statistics.median(tpots) if tpots else None
    best = best_rows(options.sampling, batch_size)
    context = options.input_len + options.output_len / 2
    moved = decode_bytes(plan, batch_size=batch_size, context=context, best_rows=best)
    gbs = moved / tpot / 1e9 if tpot else None
    return BatchLatency(
        batch_size=batch_size,
        ttft_ms=1e3 * statistics.median(times.ttft for times in requests),
        tpot_ms=1e3 * tpot if tpot else None,
        itl_ms=tuple(1e3 * gap for gap in gaps),
        tokens_per_second=statistics.median(one.tokens / one.seconds for one in rounds),
        bandwidth_gbs=gbs,
        bandwidth_fraction=gbs / machine_gbs if gbs else None,
    )


def check_lengths(limits: Limits, *, input_len: int, output_len: int) -> None:
    """Refuse lengths that the engine cannot hold."""
    if input_len > limits.max_input_len:
        raise UsageError(
            "--input_len is more than the engine allows",
            expected=f"at most {limits.max_input_len}",
            got=str(input_len),
            hint=f"give --input_len {limits.max_input_len} or less",
        )
    if input_len + output_len > limits.max_seq_len:
        raise UsageError(
            "--input_len and --output_len together are more than the engine allows",
            expected=f"at most {limits.max_seq_len}",
            got=f"{input_len} + {output_len}",
            hint=f"lower them to {limits.max_seq_len} in all; `ingot inspect ENGINE` lists the limits",
        )
