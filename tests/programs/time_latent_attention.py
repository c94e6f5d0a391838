"""Time kernels of latent attention: a sequence's new tokens over its cache, beside the arithmetic peak of one thread.

python -m tests.programs.time_latent_attention latent_attention.bf16.avx512 --heads 16 --rows 1 64 --context 1024
"""

import argparse
import contextlib
import statistics
import time

from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup
from ingot.plugins.cpu.native import kernel_table, peak_flops, peak_name
from ingot.plugins.cpu.session import open_native
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import batch_of, hold, one_step_plan, runnable_isa
from tests.plugins.ops.calls import random_array

BLOCK, WIDTH, RANK = 16, 576, 512  # of DeepSeek and GLM-4.7-Flash


def seconds(kernel: str, heads: int, rows: int, context: int) -> float:
    """Median of nine times of a step, each the mean of a tenth of a second."""
    dtype, blocks = DType(kernel.split(".")[1]), -(-(context + rows) // BLOCK)
    group = CacheGroup(layers=(0,), kv_heads=1, head_dim=WIDTH, tokens_per_block=BLOCK, dtype=dtype, latent=RANK)
    attrs: dict[str, Attr] = {"layer": 0, "heads": heads, "kv_heads": 1, "head_dim": WIDTH, "rank": RANK}
    q, batch = random_array(rows, heads * WIDTH), batch_of([(context, rows)], [range(blocks)])
    plan, section = one_step_plan(kernel, [q], {**attrs, "scale": WIDTH**-0.5}, batch, group)
    options = SessionOptions(num_blocks=(blocks,), threads=1)
    with contextlib.closing(open_native(plan, section, options, runnable_isa(kernel))) as session:
        session.native.fill_kv(0.01)
        hold(session, plan.limits.max_batch_size)
        session.native.write_buffer("in0", q)
        begin = time.perf_counter()
        session.run(batch)
        count = max(1, int(0.1 / (time.perf_counter() - begin)))
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            for _ in range(count):
                session.run(batch)
            times.append((time.perf_counter() - begin) / count)
    return statistics.median(times)


def main() -> None:
    names = [name for name in kernel_table() if name.startswith("latent_attention.")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", choices=names, metavar="KERNEL", help=", ".join(names))
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 20], help="query heads")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="new tokens of the sequence")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="tokens in the cache")
    options = parser.parse_args()
    print("| kernel | heads | rows | context | µs | Gop/s | of the peak |\n|---|---|---|---|---|---|---|")
    for kernel in options.kernels:
        for heads in options.heads:
            for rows in options.rows:
                for context in options.context:
                    took, peak = seconds(kernel, heads, rows, context), peak_flops(peak_name(kernel), 1)
                    pairs = rows * context + rows * (rows + 1) // 2
                    speed = 2 * pairs * heads * (WIDTH + RANK) / took
                    words = (kernel, heads, rows, context, f"{took * 1e6:.0f}", f"{speed / 1e9:.0f}")
                    print(f"| {' | '.join(map(str, words))} | {100 * speed / peak:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
