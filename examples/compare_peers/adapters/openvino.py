"""OpenVINO GenAI with continuous batching; exported by optimum-intel, weights compressed by nncf (8-bit head)."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from compare_peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes

_FORMATS = {
    "int4 g128": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
    "int8": ["int8"],
}


def prepare(job: Job) -> None:
    """Checkpoint → OpenVINO's intermediate representation."""
    shutil.rmtree(job.prepared, ignore_errors=True)
    program = Path(sys.executable).parent / "optimum-cli"
    task = ["--task", "text-generation-with-past", "--weight-format", *_FORMATS[job.weights]]
    subprocess.run([program, "export", "openvino", "--model", job.checkpoint, *task, job.prepared], check=True)


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """Step by step: the first tokens end when every request has one."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    settings = {"INFERENCE_NUM_THREADS": job.threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(job.prepared), scheduler, "CPU", settings)
    numbers = iter(range(1_000_000))

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        start = time.perf_counter()
        handles = [
            pipeline.add_request(next(numbers), openvino.Tensor(np.array([prompt], np.int64)), config)
            for prompt in prompts
        ]
        waiting, first = list(handles), start
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if waiting:
                waiting, first = [handle for handle in waiting if not handle.can_read()], time.perf_counter()
        return first - start, time.perf_counter() - first

    return f"openvino-genai {openvino_genai.__version__}", time_regimes(generate, regimes_of(job))


if __name__ == "__main__":
    serve(prepare, measure)
