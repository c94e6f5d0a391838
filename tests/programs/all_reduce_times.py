"""What it takes ranks to meet: the all_reduce steps of a model with 2,048 columns, by the rows of a step.

python -m tests.programs.all_reduce_times [--ranks 2] [--rounds 200] [--collectives shm]

By itself it starts processes that meet in shared memory, with a thread each. Under mpirun -n RANKS, ranks are those
that MPI has started, and --collectives mpi has them meet by MPI. Times are those of rank 0 from the end of the product
before: they hold what the other ranks need longer for theirs.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.runtime.distributed import find_link
from ingot.runtime.session import LoadedEngine, load_engine
from ingot.step_io import TimedSession
from ingot.timed_run import TimedRun
from tests.runtime.rank_processes import RankProcesses

ROWS = (1, 8, 64, 512)
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def make_engine(folder: Path, ranks: int) -> Path:
    """Small products behind wide rows, so that ranks come together soon."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    convert(ConvertOptions(config=folder / "config.json", random_weights=1, output_dir=folder / "c"))
    build(BuildConfig(target="cpu", precision="w8", tp_size=ranks, autotune=False), folder / "c", folder / "e")
    return folder / "e"


@contextlib.contextmanager
def opened(ranks: int, config: RuntimeConfig) -> Iterator[LoadedEngine]:
    """The engine in rank 0; the processes of other ranks end in here."""
    link = find_link()
    with tempfile.TemporaryDirectory() as folder:
        own = make_engine(Path(folder), ranks) if link is None or link.rank == 0 else Path()
        if link is not None:
            yield load_engine(Path(link.exchange(str(own))[0]), config)
            return
        processes = RankProcesses(ranks - 1)
        with processes.runner(own, ranks, config) as runner:
            yield LoadedEngine(engine=runner.engine, session=processes.session, limits=runner.model_info.limits)
        processes.close()


def measure(loaded: LoadedEngine, rounds: int) -> dict[int, list[float]]:
    """Microseconds of every all_reduce step, by rows."""
    session, plan = loaded.session, loaded.engine.plan
    assert isinstance(session, TimedSession)
    steps = [i for i, step in enumerate(plan.steps) if step.op == "all_reduce" and "layers.3" not in step.name]
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    run = TimedRun(session, plan, sequences=1, length=max(ROWS))
    draw = np.random.default_rng(0)
    for _ in range(rounds):
        for rows in ROWS:
            for step in run.prefill(draw.integers(0, plan.vocab_size, rows).astype(np.int32)):
                found[rows] += (1e6 * step.times.parts[steps]).tolist()
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--collectives", default="shm")
    given = parser.parse_args()
    config = RuntimeConfig(threads=1, collectives=given.collectives, kv_cache_memory=1 << 26)
    with opened(given.ranks, config) as loaded:
        found = measure(loaded, given.rounds)
        loaded.session.close()
    print(f"{given.ranks} ranks, {given.collectives}, {given.rounds} rounds in turn; us of an all_reduce")
    print("| rows x 8 KiB | median | best tenth |\n|---|---|---|")
    for rows, times in found.items():
        print(f"| {rows} | {np.median(times):.1f} | {np.quantile(times, 0.1):.1f} |")


if __name__ == "__main__":
    main()
