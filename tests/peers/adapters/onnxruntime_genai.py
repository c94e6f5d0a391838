"""ONNX Runtime GenAI in int4."""

import shutil
import subprocess
import sys
import time

import numpy as np
import onnxruntime_genai

from tests.peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes


def prepare(job: Job) -> None:
    """Checkpoint → its ONNX model and configuration."""
    shutil.rmtree(job.prepared, ignore_errors=True)
    folders = ["-i", str(job.checkpoint), "-o", str(job.prepared)]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", *folders]
    cache = job.folder / "cache"
    subprocess.run([*builder, "-p", job.weights, "-e", "cpu", "-c", cache], check=True)
    shutil.rmtree(cache, ignore_errors=True)


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """A generator steps through the whole batch."""
    config = onnxruntime_genai.Config(str(job.prepared))
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {job.threads}}}}}}}}}')
    model = onnxruntime_genai.Model(config)

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        length = len(prompts[0]) + tokens
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
        generator = onnxruntime_genai.Generator(model, params)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return first - start, time.perf_counter() - first

    return f"onnxruntime-genai {onnxruntime_genai.__version__}", time_regimes(generate, regimes_of(job))


if __name__ == "__main__":
    serve(prepare, measure)
