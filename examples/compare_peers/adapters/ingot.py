"""ingot: convert, build for the ISA, generate through the executor that serves."""

from pathlib import Path

from compare_peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes
from ingot import __version__
from ingot.bench.timing import time_requests
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.runtime import ModelRunner


def prepare(job: Job) -> None:
    """Checkpoint once for all precisions, then the Engine."""
    checkpoint = job.folder / "checkpoint"
    if not checkpoint.exists():
        convert(ConvertOptions(model_dir=job.checkpoint, output_dir=checkpoint))
    build(BuildConfig(target=f"cpu/{job.isa}", precision=job.weights), checkpoint, engine_dir(job))


def engine_dir(job: Job) -> Path:
    """The Engine of this job."""
    return job.prepared.with_name(f"{job.prepared.name}-{job.isa}")


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """Draws included, as in the server."""
    with ModelRunner.from_dir(engine_dir(job), threads=job.threads, isa=job.isa) as runner:

        def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
            measured = time_requests(runner, prompts, tokens)
            first = max(times.ttft for times in measured.requests)
            return first, measured.seconds - first

        return __version__, time_regimes(generate, regimes_of(job))


if __name__ == "__main__":
    serve(prepare, measure)
