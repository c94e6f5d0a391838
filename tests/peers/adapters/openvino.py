"""OpenVINO GenAI with continuous batching; exported by optimum-intel, weights compressed by nncf (8-bit head)."""

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from tests.peers.adapters.protocol import Job, Prompts, regimes_of, serve, time_regimes
from tests.peers.adapters.stepping import run_load
from tests.peers.load import RUNNING, Load

_FORMATS = {"int4 g128": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0"], "int8": ["int8"]}


def prepare(job: Job) -> None:
    """Checkpoint → OpenVINO's intermediate representation."""
    shutil.rmtree(job.prepared, ignore_errors=True)
    program = Path(sys.executable).parent / "optimum-cli"
    task = ["--task", "text-generation-with-past", "--weight-format", *_FORMATS[job.weights]]
    subprocess.run([program, "export", "openvino", "--model", job.checkpoint, *task, job.prepared], check=True)


class Batching:
    """Its continuous batching pipeline."""

    def __init__(self, job: Job, running: int | None = None) -> None:
        """running: how many requests at once; None: its default."""
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        if running is not None:
            scheduler.max_num_seqs = running
        settings = {"INFERENCE_NUM_THREADS": job.threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(job.prepared), scheduler, "CPU", settings)
        self._numbers = itertools.count()
        self._handles: dict[int, Any] = {}

    def request(self, prompt: Sequence[int], tokens: int) -> Any:
        """Its handle of a request that generates exactly so many tokens, greedily."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        return self.pipeline.add_request(next(self._numbers), openvino.Tensor(np.array([prompt], np.int64)), config)

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        """For `run_load`."""
        self._handles[number] = self.request(prompt, tokens)

    def step(self) -> dict[int, int]:
        """For `run_load`."""
        if not self.pipeline.has_non_finished_requests():
            raise RuntimeError("requests ended before they had all their tokens")
        self.pipeline.step()
        came: dict[int, int] = {}
        for number, handle in self._handles.items():
            while handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                came[number] = came.get(number, 0) + tokens
        running = openvino_genai.GenerationStatus.RUNNING
        self._handles = {number: handle for number, handle in self._handles.items() if handle.get_status() == running}
        return came


def measure(job: Job) -> tuple[str, dict[str, float]]:
    """Step by step: the first tokens end when every request has one."""
    engine = Batching(job)

    def generate(prompts: Prompts, tokens: int) -> tuple[float, float]:
        start = time.perf_counter()
        handles = [engine.request(prompt, tokens) for prompt in prompts]  # a request ends when its handle is dropped
        waiting, first = handles, start
        while engine.pipeline.has_non_finished_requests():
            engine.pipeline.step()
            if waiting:
                waiting, first = [handle for handle in waiting if not handle.can_read()], time.perf_counter()
        end = time.perf_counter()
        came = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
        if came != len(prompts) * tokens:
            raise RuntimeError(f"{came} tokens came, of {len(prompts)} x {tokens}")
        return first - start, end - first

    return f"openvino-genai {openvino_genai.__version__}", time_regimes(generate, regimes_of(job))


def load(job: Job) -> str:
    """No server is between."""
    return run_load(Batching(job, RUNNING), Load.from_json(sys.stdin.read())).as_json()


if __name__ == "__main__":
    serve(prepare, measure, {"load": load})
