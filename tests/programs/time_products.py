"""How fast kernels multiply here: one shape, several kernels in turn, by numbers of rows.

python -m tests.programs.time_products matmul.w4a8.avx512:128 matmul.w4ta8.avx512:128 [--rows 1,8,256] [--n 11264]
    [--k 2048] [--rounds 5]
python -m tests.programs.time_products moe_gate_up.bf16.avx512bf16 moe_gate_up.bf16c.avx512bf16 --experts 64 --slots 8
    --n 1536 --k 2048

A kernel is written as plans name it, with the group of its weights behind a colon. Values are random; weights lie in
memory, one copy. Prints a table: medians of the rounds, in Top/s and in GB/s of weights. A round takes each once.

For kernels of experts, --n and --k are the size of one expert; --n counts the rows of gate and up. Each row of the
input takes --slots experts, other ones in each call. Weights that do not fit the CPU's caches come from memory. GB/s
count the experts that so many rows take on average.
"""

import argparse
import statistics

from ingot.dtypes import DType
from ingot.plugins.cpu.target import CpuTarget
from ingot.plugins.layouts import num_panels, panel_bytes
from ingot.plugins.target import Product


def product(text: str, n: int, k: int, experts: int = 0, slots: int = 0) -> Product:
    """matmul.w4a8.avx512:128"""
    kernel, _, group = text.partition(":")
    op, name, _ = kernel.split(".")
    dtype = DType(name.removesuffix("a8"))
    size = int(group or 0)
    if op == "matmul":
        experts = slots = 0
    return Product(
        kernel=kernel,
        n=n,
        k=k,
        group=size,
        gated=op == "moe_gate_up",
        panel_bytes=panel_bytes(k, dtype, size),
        experts=experts,
        slots=slots,
    )


def weight_bytes(product: Product, rows: int) -> float:
    """That are read."""
    panels = num_panels(product.n, gated=product.gated) * product.panel_bytes
    if not product.experts:
        return panels
    return panels * product.experts * (1 - (1 - product.slots / product.experts) ** rows)


def operations(product: Product, rows: int) -> int:
    """Products and sums."""
    return 2 * rows * max(1, product.slots) * product.n * product.k


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
            bandwidth = 1e-9 * weight_bytes(each, count) / middle
            cells.append(f"{1e-12 * operations(each, count) / middle:.2f} ({bandwidth:.1f} GB/s)")
        table.append(f"| {count} | " + " | ".join(cells) + " |")
    return table


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--rows", default="1,8,256", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--n", type=int, default=11264)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8, help="experts of a row")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    products = [product(each, options.n, options.k, options.experts, options.slots) for each in options.kernels]
    print("\n".join(lines(products, options.rows, options.rounds)))


if __name__ == "__main__":
    main()
