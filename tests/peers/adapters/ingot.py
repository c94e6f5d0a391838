"""ingot: convert, build for the ISA, generate through the executor that serves."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot import __version__
from ingot.bench.timing import time_requests
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.runtime import ModelRunner
from tests.peers.adapters.protocol import Job, Prompts, become, regimes_of, serve, time_regimes
from tests.peers.load import RUNNING
from tests.peers.peers import SCREENED
from tests.peers.regimes import Regime

LONGEST = 8192  # tokens of a prompt


def prepare(job: Job) -> None:
    """Checkpoint once for all precisions, or once for a GGUF file; then the Engine."""
    checkpoint = _checkpoint(job)
    if not checkpoint.exists():
        convert(ConvertOptions(model_dir=job.file if job.of_file else job.checkpoint, output_dir=checkpoint))
    build(_config(job), checkpoint, engine_dir(job))


def _checkpoint(job: Job) -> Path:
    return job.folder / (f"checkpoint-{job.of_file.lower()}" if job.of_file else "checkpoint")


def lengthen(job: Job) -> None:
    """An Engine beside, which takes prompts as long as the model's positions allow."""
    longest = min(read_plan(engine_dir(job)).max_positions, LONGEST)
    config = dataclasses.replace(_config(job), max_input_len=longest, max_seq_len=longest + 1)
    build(config, _checkpoint(job), engine_dir(job, long=True))


def _config(job: Job) -> BuildConfig:
    precision = "auto" if job.of_file else job.weights.removesuffix("-screened")
    return BuildConfig(target=f"cpu/{job.isa}", precision=precision, screen_lm_head=job.weights == SCREENED)


def engine_dir(job: Job, *, long: bool = False) -> Path:
    """The Engine of this job."""
    return job.prepared.with_name(f"{job.prepared.name}-{job.isa}{'-long' if long else ''}")


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """Draws included, as in the server; long prompts on the long Engine."""
    regimes = regimes_of(job)
    speeds: dict[str, float] = {}
    for long in (False, True):
        if chosen := [regime for regime in regimes if regime.long == long]:
            speeds |= _measure(job, engine_dir(job, long=long), chosen)
    return __version__, speeds


def _measure(job: Job, directory: Path, regimes: Sequence[Regime]) -> dict[str, float]:
    with ModelRunner.from_dir(directory, threads=job.threads, isa=job.isa) as runner:

        def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
            measured = time_requests(runner, prompts, tokens)
            first = max(times.ttft for times in measured.requests)
            return first, measured.seconds - first

        return time_regimes(generate, regimes)


def start_server(job: Job) -> None:
    """`ingot serve`, as it is but for patience: a request that waits longer than a limit has missed it."""
    patience = ["--max_queue", 100_000, "--request_timeout", 86_400]
    become(
        sys.executable,
        "-m",
        "ingot",
        "serve",
        "--engine_dir",
        engine_dir(job),
        "--port",
        sys.argv[3],
        "--served_model_name",
        "model",
        "--threads",
        job.threads,
        "--isa",
        job.isa,
        "--max_batch_size",
        RUNNING,
        "--log_level",
        "warning",
        *patience,
    )


if __name__ == "__main__":
    serve(prepare, measure, {"lengthen": lengthen, "serve": start_server})
