"""Engines of several ranks, one of which is killed or stopped at a random moment; then what the others say and leave.

python -m tests.programs.rank_faults [--rounds 200] [--seed 0] [--margin 10] [--timeout 1]

Builds a tiny engine of 2 ranks that share each layer, and one of two pipeline stages of 2 such ranks. A round starts a
process for each rank, lets the first one generate and move KV blocks without end, and takes one rank away while they
open, or while steps run. It fails unless all others end by themselves within seconds, say which rank it was, and leave
nothing in /dev/shm.
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.errors import IngotError
from ingot.runtime import ModelRunner
from ingot.runtime.session import load_engine
from ingot.step_io import BlockSession, Session
from tests.runtime.rank_processes import PipeLink

LOOK = 0.05  # seconds between two looks
MOVES = 200
SHAPE = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, '
    '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 61, '
    '"max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "silu"}'
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What a round does: to which rank, how, and seconds after all have begun to open (or to compute).
    timeout: seconds that a rank may be late."""

    ranks: int
    victim: int
    stop: bool
    computing: bool
    after: float
    timeout: float

    def __str__(self) -> str:
        what, when = "stopped" if self.stop else "killed", "computing" if self.computing else "opening"
        return f"{what} while {when}"


def make_engines(folder: Path) -> dict[int, Path]:
    """By number of ranks."""
    (folder / "config.json").write_text(SHAPE)
    convert(ConvertOptions(config=folder / "config.json", random_weights=1, output_dir=folder / "c"))
    engines = {}
    for ranks in (2, 4):
        engines[ranks] = folder / f"e{ranks}"
        config = BuildConfig(target="cpu", tp_size=2, pp_size=ranks // 2, autotune=False)
        build(config, folder / "c", engines[ranks])
    return engines


def draw_faults(seed: int, timeout: float) -> Iterator[Fault]:
    """Without end. Nothing is stopped while it opens, for which others give it minutes; nor rank 0, whose next step the
    others await as long as it takes."""
    random_ = random.Random(seed)
    while True:
        ranks, computing = random_.choice((2, 4)), random_.random() < 0.7
        stop = computing and random_.random() < 0.4
        yield Fault(
            ranks=ranks,
            victim=random_.randrange(1 if stop else 0, ranks),
            stop=stop,
            computing=computing,
            after=random_.uniform(0, 0.3),
            timeout=timeout,
        )


def run_rank(
    rank: int, ranks: int, engine: Path, pipes: Sequence[Connection], told: Connection, timeout: float
) -> None:
    """The process of one rank: says "computing", and then why it ended."""
    config = RuntimeConfig(rank_timeout=timeout, threads=1, kv_cache_memory=1 << 24)
    try:
        told.send("opening")
        loaded = load_engine(engine, config, PipeLink(rank, ranks, pipes))
        with ModelRunner(loaded, config) as runner:
            runner.generate([[1]], max_new_tokens=1)
            told.send("computing")
            while True:
                runner.generate([[1, 2, 3], [4]], max_new_tokens=100, end_id=-1)
                runner.executor.while_still(lambda: move_blocks(loaded.session))
    except IngotError as error:
        told.send(str(error))
        sys.exit(1)


def move_blocks(session: Session) -> None:
    """Collect a free block of all ranks, and give it back, some hundred times: as long as some steps take."""
    assert isinstance(session, BlockSession), "CPU ranks have blocks that move"
    data = np.zeros(session.block_bytes(0), np.uint8)
    for _ in range(MOVES):
        session.read_block(0, 0, data)
        session.write_block(0, 0, data)


def run_round(fault: Fault, engine: Path, margin: float) -> str:
    """Why it is not as it must be, or ""."""
    context, before = multiprocessing.get_context("spawn"), set(os.listdir("/dev/shm"))
    pairs = [context.Pipe() for _ in range(fault.ranks - 1)]
    heard, told = zip(*(context.Pipe(duplex=False) for _ in range(fault.ranks)), strict=True)
    processes: list[BaseProcess] = []
    for rank in range(fault.ranks):
        pipes = [here for here, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
        processes.append(
            context.Process(target=run_rank, args=(rank, fault.ranks, engine, pipes, told[rank], fault.timeout))
        )
        processes[-1].start()
    for pipe in (*(each for pair in pairs for each in pair), *told):
        pipe.close()
    try:
        return _watch(fault, processes, heard, margin) or (
            "" if set(os.listdir("/dev/shm")) <= before else "left in /dev/shm"
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


def _watch(fault: Fault, processes: Sequence[BaseProcess], heard: Sequence[Connection], margin: float) -> str:
    for pipe in heard:
        pipe.recv()
    if fault.computing and heard[0].recv() != "computing":
        return "it did not begin to compute"
    time.sleep(fault.after)
    victim = processes[fault.victim]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP if fault.stop else signal.SIGKILL)
    others = [rank for rank in range(fault.ranks) if rank != fault.victim]
    _await_end([processes[rank] for rank in others], margin)
    for rank in others:
        if processes[rank].exitcode is None:
            return f"rank {rank} has not ended"
        if processes[rank].exitcode != 1:
            return f"rank {rank} ended with exit code {processes[rank].exitcode}"
    words = [_last_words(heard[rank]) for rank in others]
    wanted = f"rank {fault.victim} " if fault.computing else "another rank has ended"
    named = [each for each in words if wanted in each or (not fault.computing and "has ended" in each)]
    if len(named) < len(words):
        return f"words that do not name rank {fault.victim}: {words}"
    if fault.stop:
        os.kill(victim.pid, signal.SIGCONT)
        _await_end([victim], margin)
        if victim.exitcode != 1:
            return f"rank {fault.victim}, which was stopped, has exit code {victim.exitcode} when it goes on"
    return ""


def _await_end(processes: Sequence[BaseProcess], margin: float) -> None:
    """Until they have ended, or long enough; time in which this process could not look, either, does not count."""
    looks = round(margin / LOOK)
    while looks and any(process.exitcode is None for process in processes):
        time.sleep(LOOK)
        looks -= 1


def _last_words(pipe: Connection) -> str:
    said = ""
    try:
        while pipe.poll(1):
            said = pipe.recv()
    except EOFError:
        pass
    return said


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--margin", type=float, default=10.0, help="seconds in which all must have ended")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds that a rank may be late")
    given = parser.parse_args()
    done: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        engines = make_engines(Path(folder))
        for fault, _ in zip(draw_faults(given.seed, given.timeout), range(given.rounds), strict=False):
            began = time.monotonic()
            if problem := run_round(fault, engines[fault.ranks], given.margin + given.timeout):
                sys.exit(f"round {sum(done.values()) + 1}, rank {fault.victim} of {fault.ranks} {fault}: {problem}")
            done[f"{fault}, {fault.ranks} ranks"] += 1
            slowest = max(slowest, time.monotonic() - began)
    for what, count in sorted(done.items()):
        print(f"{count:5} {what}")
    print(f"{sum(done.values()):5} rounds, the longest {slowest:.1f} s; nothing left behind")


if __name__ == "__main__":
    main()
