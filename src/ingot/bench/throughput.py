"""`ingot bench throughput`: many requests at once; tokens and requests per second, and what one request saw."""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

from ingot.bench.bytes_read import best_rows, kv_bytes_per_token, machine_bandwidth, state_bytes, weight_bytes_per_step
from ingot.bench.latency import check_lengths
from ingot.bench.timing import GREEDY, Round, random_prompts, time_requests
from ingot.configs.runtime import RuntimeConfig
from ingot.configs.sampling import SamplingParams
from ingot.engine import read_manifest
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import join_ranks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputOptions:
    """All requests are given at once; the engine's max_batch_size, or a lower one given here, bounds those running.

    sampling  of every request; its max_tokens is output_len
    """

    engine_dir: Path
    num_requests: int = 64
    input_len: int = 128
    output_len: int = 64
    max_batch_size: int | None = None
    warmup: int = 1
    repetitions: int = 3
    seed: int = 0
    sampling: SamplingParams = GREEDY
    threads: int | None = None
    isa: str | None = None
    target: str | None = None
    use_mmap: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputReport:
    """Medians over repetitions. TTFT counts the time a request waited; fractions as in `LatencyReport`, counting the
    weights once per step and the keys and values of every request.

    host_fraction  of the time in which no kernel ran
    """

    engine: str
    target: str
    num_requests: int
    input_len: int
    output_len: int
    repetitions: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    steps: int
    ttft_ms_median: float
    tpot_ms_median: float | None
    host_fraction: float
    machine_gbs: float
    buffer_bytes: int
    bandwidth_gbs: float
    bandwidth_fraction: float


def bench_throughput(options: ThroughputOptions, progress: Callable[[str, int, int], None]) -> ThroughputReport:
    """Run the same load `repetitions` times after `warmup` untimed rounds."""
    check_lengths(read_manifest(options.engine_dir).limits, input_len=options.input_len, output_len=options.output_len)
    config = RuntimeConfig(threads=options.threads, isa=options.isa, target=options.target, use_mmap=options.use_mmap)
    join_ranks(options.engine_dir, config)
    with ModelRunner.from_dir(
        options.engine_dir,
        threads=options.threads,
        isa=options.isa,
        target=options.target,
        max_batch_size=options.max_batch_size,
        use_mmap=options.use_mmap,
    ) as runner:
        return _measure(runner, options, progress)


def _measure(
    runner: ModelRunner, options: ThroughputOptions, progress: Callable[[str, int, int], None]
) -> ThroughputReport:
    plan, target = runner.engine.plan, runner.engine.manifest.target
    buffer_bytes = weight_bytes_per_step(plan)
    machine = [machine_bandwidth(target, buffer_bytes, options.threads) / 1e9]
    rounds: list[Round] = []
    total = options.warmup + options.repetitions
    for index in range(total):
        progress("rounds", index, total)
        prompts = random_prompts(options.num_requests, options.input_len, plan.vocab_size, options.seed, index)
        measured = time_requests(runner, prompts, options.output_len, options.sampling)
        if index >= options.warmup:
            rounds.append(measured)
            machine.append(machine_bandwidth(target, buffer_bytes, options.threads) / 1e9)
    progress("rounds", total, total)
    machine_gbs = statistics.median(machine)
    steps = round(statistics.median(one.steps for one in rounds))
    seconds = statistics.median(one.seconds for one in rounds)
    tpots = [times.tpot for one in rounds for times in one.requests if times.tpot is not None]
    generated = options.num_requests * options.output_len
    context = options.input_len + options.output_len / 2
    rows = (generated + options.num_requests * options.input_len) / steps
    most = min(options.num_requests, options.max_batch_size or plan.limits.max_batch_size)
    weights = weight_bytes_per_step(plan, rows, best_rows=best_rows(options.sampling, most))
    of_token = context * kv_bytes_per_token(plan) + 2 * state_bytes(plan)
    gbs = (steps * weights + generated * of_token) / seconds / 1e9
    return ThroughputReport(
        engine=str(options.engine_dir),
        target=target,
        num_requests=options.num_requests,
        input_len=options.input_len,
        output_len=options.output_len,
        repetitions=options.repetitions,
        seconds=seconds,
        requests_per_second=options.num_requests / seconds,
        output_tokens_per_second=generated / seconds,
        total_tokens_per_second=(generated + options.num_requests * options.input_len) / seconds,
        steps=steps,
        ttft_ms_median=1e3 * statistics.median(times.ttft for one in rounds for times in one.requests),
        tpot_ms_median=1e3 * statistics.median(tpots) if tpots else None,
        host_fraction=statistics.median(one.host_fraction for one in rounds),
        machine_gbs=machine_gbs,
        buffer_bytes=buffer_bytes,
        bandwidth_gbs=gbs,
        bandwidth_fraction=gbs / machine_gbs,
    )
