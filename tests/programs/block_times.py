"""What it takes to read and to write one KV block of all ranks, as a server does that computes prompts for others.

python -m tests.programs.block_times [--rounds 200] [--layers 22] [--kv_heads 4] [--head_dim 64]

Builds engines with such a cache, in bf16 with 32 tokens a block, and nearly no weights: of one rank, of two and four
that share each layer, of two stages, and of two stages of two ranks. Each rank is a process with one thread, all on
this machine. Prints microseconds: the median, and the fastest tenth.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.runtime.kv_transfer import Bytes
from ingot.runtime.session import load_engine
from ingot.step_io import BlockSession
from tests.runtime.rank_processes import RankProcesses

LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))  # ranks of a stage, stages
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def measure(session: object, rounds: int) -> tuple[int, list[str]]:
    """Bytes of a block; microseconds of reading and of writing it."""
    assert isinstance(session, BlockSession), "CPU ranks have blocks that move"
    data = np.zeros(session.block_bytes(0), np.uint8)
    return len(data), [timed(move, data, rounds) for move in (session.read_block, session.write_block)]


def timed(move: Callable[[int, int, Bytes], None], data: Bytes, rounds: int) -> str:
    """Median and fastest tenth."""
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        move(0, 0, data)
        taken.append(1e6 * (time.perf_counter() - begin))
    return ", ".join(f"{each:.0f}" for each in np.quantile(taken, (0.5, 0.1)))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--kv_heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=64)
    given = parser.parse_args()
    heads = {"num_attention_heads": given.kv_heads, "num_key_value_heads": given.kv_heads, "head_dim": given.head_dim}
    config = BuildConfig(target="cpu", precision="bf16", tokens_per_block=32, autotune=False)
    runtime = RuntimeConfig(threads=1, kv_cache_memory=1 << 28, rank_timeout=60)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "config.json").write_text(json.dumps({**SHAPE, **heads, "num_hidden_layers": given.layers}))
        convert(ConvertOptions(config=work / "config.json", random_weights=1, output_dir=work / "c"))
        for tp, pp in LAYOUTS:
            engine = work / f"{tp}x{pp}"
            build(dataclasses.replace(config, tp_size=tp, pp_size=pp), work / "c", engine)
            if tp * pp == 1:
                loaded = load_engine(engine, runtime)
                nbytes, (read, write) = measure(loaded.session, given.rounds)
                loaded.session.close()
                loaded.engine.close()
                print(f"blocks of {nbytes / 1024:.0f} KiB; microseconds, median and fastest tenth")
            else:
                processes = RankProcesses(tp * pp - 1)
                with processes.runner(engine, tp * pp, runtime):
                    _, (read, write) = measure(processes.session, given.rounds)
                processes.close()
            print(f"tp {tp} x pp {pp}: read {read}; write {write}", flush=True)


if __name__ == "__main__":
    main()
