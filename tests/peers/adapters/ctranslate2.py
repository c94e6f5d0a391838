"""CTranslate2 in int8."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import ctranslate2

from tests.peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes


def prepare(job: Job) -> None:
    """Checkpoint → CTranslate2's own format."""
    program = Path(sys.executable).parent / "ct2-transformers-converter"
    shutil.rmtree(job.prepared, ignore_errors=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    options = ["--quantization", job.weights, "--output_dir", str(job.prepared)]
    subprocess.run([program, "--model", job.checkpoint, *options], check=True)


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """All requests in one batch; a callback sees every token."""
    engine = ctranslate2.Generator(str(job.prepared), device="cpu", intra_threads=job.threads, compute_type=job.weights)

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        waiting, seen, first = len(prompts), 0, 0.0

        def note(step: ctranslate2.GenerationStepResult) -> bool:
            nonlocal waiting, seen, first
            seen += 1
            if step.step == 0:
                waiting, first = waiting - 1, time.perf_counter()
            return False

        start = time.perf_counter()
        engine.generate_batch(
            [[f"<x{token}>" for token in prompt] for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=64,
            callback=note,
        )
        end = time.perf_counter()
        if waiting or seen != len(prompts) * tokens:
            raise RuntimeError(f"{seen} tokens came, of {len(prompts)} x {tokens}")
        return first - start, end - first

    return f"ctranslate2 {ctranslate2.__version__}", time_regimes(generate, regimes_of(job))


if __name__ == "__main__":
    serve(prepare, measure)
