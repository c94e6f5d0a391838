"""What the host of a GPU engine takes for each decode step: on the emulated GPU, whose kernels are left out.

python -m tests.programs.host_time [--sequences 1,64,256] [--steps 60] [--rounds 3] [--sampled] [--parts] [--streamed]
    [--graph_us 0] [--engine_dir DIR]

A tiny engine decodes after short prompts. Prints for each number of sequences, in microseconds of a step (medians):

    engine   the engine's loop, on a thread of its own without any other
    parts    of it, with --parts; taking these times costs time itself
    reader   with --streamed: processor time of a thread that reads every step, as `ingot bench latency` has it
    step     then: a step in all. The engine's loop and the reader take turns
    ahead    then: steps that were submitted while another one ran, in percent

graph_us: how long the emulated GPU is busy with a step: the host's work is hidden where a step takes no longer.
engine_dir: where the engine is, or is made.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ingot.bench.timing import GREEDY, random_prompts, time_requests
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.sampling import SamplingParams
from ingot.convert.convert import convert
from ingot.plugins.cuda import products, session
from ingot.plugins.cuda.gpu import Device
from ingot.plugins.cuda.sampling import Sampler
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.cuda.step_tables import StepTables
from ingot.runtime import step_loop
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet, Readers
from ingot.runtime.reports import StepReport
from ingot.runtime.request import Request
from ingot.runtime.scheduler import Scheduler
from ingot.runtime.step_loop import StepLoop
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.cuda.emulation import build_emulation

PROMPT = 16
DRAWN = (5, -1.0, 1)  # what every draw gives: token, log probability, rank
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
PARTS: dict[str, list[tuple[Any, str]]] = {
    "scheduler": [(Scheduler, "schedule"), (Scheduler, "following"), (Scheduler, "repeatable")],
    "batch": [(step_loop, "assemble"), (step_loop, "follow")],
    "ids": [(Sampler, "complete")],
    "check": [(session, "check_batch"), (session, "check_next")],
    "tables": [(StepTables, "fill")],
    "draws": [(Sampler, "of_step"), (Sampler, "submit")],
    "driver": [(Device, name) for name in ("enter", "send", "fetch", "replay", "launch", "record", "wait_for")],
    "results": [(Sampler, "finish")],
    "requests": [(StepLoop, "_finish_step"), (Readers, "put")],
    "loop": [(StepLoop, "step")],
    "session": [(CudaSession, "submit"), (CudaSession, "wait")],
}


class Clock:
    """Time of each part on one thread, without that of parts in it."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self._inner = [0]

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time counts for the part."""

        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter_ns()
            self._inner.append(0)
            try:
                return call(*given, **named)
            finally:
                taken = time.perf_counter_ns() - begin
                self.taken[part] += taken - self._inner.pop()
                self._inner[-1] += taken

        return timed


@contextlib.contextmanager
def emulated_gpu(graph_seconds: float) -> Iterator[None]:
    """This process has a GPU that computes nothing, and a compiler for it."""
    emulation = build_emulation()
    path, library = f"{emulation.programs}{os.pathsep}{os.environ['PATH']}", emulation.libraries / "libcublasLt.so.13"
    driver = emulation.driver()
    driver.emulated_leave_out_kernels.argtypes = [ctypes.c_int, ctypes.c_int64]
    driver.emulated_set_devices(1)
    driver.emulated_leave_out_kernels(1, int(1e9 * graph_seconds))
    with mock.patch.dict(os.environ, PATH=path), mock.patch.object(products, "_NAMES", (str(library),)):
        yield
    driver.emulated_leave_out_kernels(0, 0)


def make_engine(engine: Path, most: int, length: int) -> None:
    """A tiny Llama, for `most` sequences of `length` tokens."""
    folder = engine.parent
    config = {**TINY_LLAMA, "head_dim": 16, "num_hidden_layers": 1, "max_position_embeddings": length}
    write_model(folder / "model", config)
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    limits = BuildConfig(
        target="cuda/sm90", precision="bf16", gemm_library=False, max_batch_size=most, max_seq_len=length
    )
    build(limits, folder / "checkpoint", engine)


def fix_draws(runner: ModelRunner) -> None:
    """Leave the results of all draws to come where no kernel overwrites them."""
    assert isinstance(runner._session, CudaSession)
    sampler, device = runner._session._sampler, runner._session.device
    token, log_prob, rank = DRAWN
    row = np.array([token, np.array(log_prob, np.float32).view(np.int32), rank], np.int32)
    device.enter()
    device.upload(sampler._results_at, np.tile(row, sampler._layout.draws))


def alone(runner: ModelRunner, sequences: int, steps: int, sampling: SamplingParams) -> Iterator[None]:
    """The engine's loop on this thread, without a reader's: goes on before each steady step, and at the end."""
    loop, outlet = runner.executor._loop, Outlet()
    prompts = random_prompts(sequences, PROMPT, runner.model_info.vocab_size, steps)
    requests = [
        Request(
            np.array(ids, np.int32),
            max_new_tokens=steps + 30,
            temperature=sampling.temperature or 0.0,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p or 1.0,
            seed=seed,
        )
        for seed, ids in enumerate(prompts)
    ]
    loop.add(requests, outlet)
    while not loop._scheduler.running or loop._scheduler.waiting or loop._submitted is None:
        loop.step()
    for _ in range(10):
        loop.step()
    for _ in range(steps):
        yield
        loop.step()
        outlet.get()
    yield
    loop.drain()


def of_thread(runner: ModelRunner, sequences: int, steps: int, sampling: SamplingParams) -> float:
    """Microseconds of a step in the engine's loop."""
    seen = [time.perf_counter_ns() for _ in alone(runner, sequences, steps, sampling)]
    return float(np.median(np.diff(seen))) / 1e3


def by_part(runner: ModelRunner, sequences: int, steps: int, sampling: SamplingParams) -> dict[str, float]:
    """The same in each part."""
    clock = Clock()
    with contextlib.ExitStack() as kept:
        for part, places in PARTS.items():
            for owner, name in places:
                call = getattr(owner, name)
                kept.callback(setattr, owner, name, call)
                setattr(owner, name, clock.timed(part, call))
        seen = [clock.taken.copy() for _ in alone(runner, sequences, steps, sampling)]
    return {part: float(np.median(np.diff([each[part] for each in seen]))) / 1e3 for part in PARTS}


def streamed(runner: ModelRunner, sequences: int, steps: int, sampling: SamplingParams) -> dict[str, float]:
    """Microseconds of a step for a reader on its own thread, and in all; and the share of steps that were submitted
    while another one ran, in percent."""
    seen: list[tuple[int, bool]] = []

    def note(report: StepReport) -> None:
        if report.decode_rows == sequences and not report.prefill_tokens:
            seen.append((time.perf_counter_ns(), loop._submitted is not None))

    loop = runner.executor._loop
    readers = []
    for count in (20, 20 + steps):
        seen.clear()
        runner.executor.report_to(note)
        prompts = random_prompts(sequences, PROMPT, runner.model_info.vocab_size, count)
        begin = time.thread_time_ns()
        time_requests(runner, prompts, count, sampling)
        readers.append(time.thread_time_ns() - begin)
    steady = seen[10:-2]
    return {
        "reader": (readers[1] - readers[0]) / steps / 1e3,
        "step": float(np.median(np.diff([when for when, _ in steady]))) / 1e3,
        "ahead": 100.0 * sum(ahead for _, ahead in steady) / len(steady),
    }


def lines(options: argparse.Namespace) -> Iterator[str]:
    """The tables."""
    sizes = [int(each) for each in options.sequences.split(",")]
    length = PROMPT + options.steps + 40
    sampling = SAMPLED if options.sampled else GREEDY
    with contextlib.ExitStack() as opened:
        folder = options.engine_dir or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        opened.enter_context(emulated_gpu(1e-6 * options.graph_us))
        engine = folder / "engine"
        if not engine.is_dir():
            make_engine(engine, max(sizes), length)
        runner = opened.enter_context(ModelRunner.from_dir(engine, enable_prefix_cache=False))
        fix_draws(runner)
        table: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
        for _ in range(options.rounds):
            for size, rounds in table.items():
                given = runner, size, options.steps, sampling
                rounds.append(
                    {"engine": of_thread(*given)}
                    | (by_part(*given) if options.parts else {})
                    | (streamed(*given) if options.streamed else {})
                )
        names = list(table[sizes[0]][0])
        yield "| sequences | " + " | ".join(names) + " |"
        yield "|---" * (len(names) + 1) + "|"
        for size, rounds in table.items():
            cells = [f"{np.median([each[name] for each in rounds]):.0f}" for name in names]
            yield f"| {size} | " + " | ".join(cells) + " |"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,64,256")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graph_us", type=float, default=0)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--engine_dir", type=Path)
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--parts", action="store_true")
    for line in lines(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
