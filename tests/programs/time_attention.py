"""How fast kernels of attention are here: several kernels in turn, by steps.

python -m tests.programs.time_attention paged_attention.bf16.avx512 paged_attention.bf16.avx512bf16
    [--steps 8x512,32x512,prompt:512] [--heads 32] [--kv_heads 4] [--head_dim 64] [--layers 16] [--threads 2]
    [--rounds 9]

A step is a number of sequences and the tokens that each has in the cache when one more is decoded, or a prompt. All
numbers of the cache are the same. The layers of a model take turns, as in an engine, so that each of many finds other
layers in the CPU's caches. Prints a table: medians of the rounds in microseconds of the median layer, in Gop/s and in
GB/s of the KV cache. The session measures the kernel alone, without the call. A round takes each kernel once. A kernel
with :plain behind its name does without AVX512_VBMI.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ingot import _cpu
from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup
from ingot.plugins.cpu.session import open_native
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import batch_of, hold, one_step_plan, runnable_isa

BLOCK = 32  # tokens


def parts(step: str) -> list[tuple[int, int]]:
    """(past, new) of each sequence. prompt:512, 8x512"""
    kind, colon, length = step.partition(":")
    if colon:
        return [(0, int(length))]
    count, _, past = kind.partition("x")
    return [(int(past), 1)] * int(count)


def call_of(kernel: str, sequences: list[tuple[int, int]], options: argparse.Namespace) -> Callable[[], float]:
    """Runs a step, and returns the seconds that the kernel took."""
    kernel, _, how = kernel.partition(":")
    permutes = _cpu.set_permutes_bytes(False)
    _cpu.set_permutes_bytes(permutes)
    heads, kv_heads, dim = options.heads, options.kv_heads, options.head_dim
    group = CacheGroup(
        window=0,
        layers=tuple(range(options.layers)),
        kv_heads=kv_heads,
        head_dim=dim,
        tokens_per_block=BLOCK,
        dtype=DType(kernel.split(".")[1]),
    )
    ends = np.cumsum([-(-sum(each) // BLOCK) for each in sequences]).tolist()
    tables = [list(range(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]
    batch = batch_of(sequences, tables)
    queries = np.random.default_rng(0).standard_normal(
        (sum(new for _, new in sequences), heads * dim), dtype=np.float32
    )
    attrs: dict[str, Attr] = {
        "layer": 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "scale": dim**-0.5,
        "window": 0,
        "softcap": 0.0,
        "bf16_bias": 0,
        "growth": 0.0,
        "growth_every": 1,
    }
    plan, section = one_step_plan(kernel, [queries, None, None], attrs, batch, group)
    (first,) = plan.steps
    layers = [replace(first, name=f"step{layer}", attrs={**attrs, "layer": layer}) for layer in group.layers]
    plan = replace(plan, steps=tuple(layers))
    session = open_native(
        plan, section, SessionOptions(num_blocks=(ends[-1],), threads=options.threads), runnable_isa(kernel)
    )
    session.native.fill_kv(0.01)
    session.native.write_buffer("in0", queries)
    hold(session, plan.limits.max_batch_size)

    def call() -> float:
        _cpu.set_permutes_bytes(permutes and how != "plain")
        return float(np.median(session.run_timed(batch)[1].parts[: len(layers)]))

    return call


def cell(kernel: str, sequences: list[tuple[int, int]], seconds: float, options: argparse.Namespace) -> str:
    """What a kernel's median comes to."""
    pairs = sum(past * new + new * (new + 1) // 2 for past, new in sequences)
    operations = 4 * pairs * options.heads * options.head_dim
    number = {"f32": 4, "bf16": 2, "int8": 1, "f8": 1}[kernel.split(".")[1]]
    token = 2 * options.kv_heads * (options.head_dim * number + (4 if number == 1 else 0))
    nbytes = sum(past + new for past, new in sequences) * token
    return f"{1e6 * seconds:.0f} us ({1e-9 * operations / seconds:.0f} Gop/s, {1e-9 * nbytes / seconds:.1f} GB/s)"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--steps", default="8x512,32x512,prompt:512", type=lambda text: text.split(","))
    for name, default in (
        ("heads", 32),
        ("kv_heads", 4),
        ("head_dim", 64),
        ("layers", 16),
        ("threads", 2),
        ("rounds", 9),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("| step | " + " | ".join(f"`{kernel}`" for kernel in options.kernels) + " |")
    print("|---" * (len(options.kernels) + 1) + "|")
    for step in options.steps:
        sequences = parts(step)
        calls = [call_of(kernel, sequences, options) for kernel in options.kernels]
        taken: list[list[float]] = [[] for _ in calls]
        for _ in range(options.rounds):
            for seconds, call in zip(taken, calls, strict=True):
                seconds.append(call())
        cells = [
            cell(kernel, sequences, statistics.median(seconds), options)
            for kernel, seconds in zip(options.kernels, taken, strict=True)
        ]
        print(f"| {step} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
