"""How fast kernels multiply here: one shape, several kernels in turn, by numbers of rows.

python -m tests.programs.time_products matmul.w4a8.avx512:128 matmul.w4ta8.avx512:128 [--rows 1,8,256] [--n 11264]
    [--k 2048] [--rounds 5]

A kernel is written as plans name it, with the group of its weights behind a colon. Values are random; weights lie in
memory, one copy. Prints a table: medians of the rounds, in Top/s and in GB/s of weights. A round takes each once.
"""

import argparse
import statistics

from ingot.dtypes import DType
from ingot.plugins.cpu.target import CpuTarget
from ingot.plugins.layouts import panel_bytes
from ingot.plugins.target import Product
from ingot.weight_formats import PANEL


def product(text: str, n: int, k: int) -> Product:
    """matmul.w4a8.avx512:128"""
    kernel, _, group = text.partition(":")
    dtype = DType(kernel.split(".")[1].removesuffix("a8"))
    size = int(group or 0)
    return Product(kernel=kernel, n=n, k=k, group=size, gated=False, panel_bytes=panel_bytes(k, dtype, size))


def lines(products: list[Product], rows: list[int], rounds: int) -> list[str]:
    """The table."""
    target = CpuTarget("amx")  # it times the kernels of every level
    table = ["| rows | " + " | ".join(f"`{each.kernel}:{each.group}`" for each in products) + " |"]
    table.append("|---" * (len(products) + 1) + "|")
    for count in rows:
        taken: list[list[float]] = [[] for _ in products]
        for _ in range(rounds):
            for seconds, each in zip(taken, products, strict=True):
                seconds.append(target.time_product(each, count, 0))
        cells = []
        for seconds, each in zip(taken, products, strict=True):
            middle = statistics.median(seconds)
            weights = -(-each.n // PANEL) * each.panel_bytes
            cells.append(f"{2e-12 * count * each.n * each.k / middle:.2f} ({1e-9 * weights / middle:.1f} GB/s)")
        table.append(f"| {count} | " + " | ".join(cells) + " |")
    return table


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--rows", default="1,8,256", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--n", type=int, default=11264)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    products = [product(each, options.n, options.k) for each in options.kernels]
    print("\n".join(lines(products, options.rows, options.rounds)))


if __name__ == "__main__":
    main()
