"""Time and memory of quantising one weight by `ingot quantize`, beside the time that its operations need at the rate of
matmuls.

python -m tests.programs.quantize_times ROWS COLUMNS [--tokens 8192] [--one_way]

The recipe is w4g128; weights and inputs are random, and part of the peak. The rates of float32 and float64 matmuls are
measured before. Operations that grow with rows * columns, such as the search of scales, are not among those counted.
--one_way: whole numbers as codes, and no fold, so that there is nothing to choose.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated import methods
from ingot.builder.calibrated.methods import Inputs, Wanted, quantise_product
from ingot.configs.quantize import DEFAULT_TOKENS, WAYS
from ingot.runtime.memory import peak_memory

SIDE = 2048  # of the matmuls whose rate is measured


def rate(kind: npt.DTypeLike) -> float:
    """Operations per second of a large matmul; the best of three."""
    a, seconds = np.ones((SIDE, SIDE), kind), []
    for _ in range(3):
        begin = time.perf_counter()
        np.matmul(a, a)
        seconds.append(time.perf_counter() - begin)
    return 2 * SIDE**3 / min(seconds)


def operations(weight_rows: int, columns: int, tokens: int, ways: int) -> tuple[float, float]:
    """(those of H and of its factor, all others): multiplications and additions of matmuls.

    A loss and the feeding back take rows * columns^2 each, three sweeps and what they begin with eight times that. What
    is rounded to the nearest has a loss, so have the outputs themselves, and 256 rows under three folds.
    """
    chosen_by_all = ways == 1 or weight_rows <= 2 * methods._CHOOSING
    fed = ways * weight_rows if chosen_by_all else weight_rows + ways * methods._CHOOSING
    losses = 2 * weight_rows + (3 * min(weight_rows, 256) if ways > 1 else 0)
    return tokens * columns**2 + columns**3 / 3, (10.0 * fed + losses) * columns**2


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int)
    parser.add_argument("columns", type=int)
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--one_way", action="store_true")
    arguments = parser.parse_args()
    draw, size = np.random.default_rng(0), (arguments.rows, arguments.columns)
    weights, x = np.empty(size, np.float32), np.empty((arguments.tokens, arguments.columns), np.float32)
    for each in (weights, x):
        draw.standard_normal(out=each, dtype=np.float32)
    x *= np.exp(0.7 * draw.standard_normal(arguments.columns)).astype(np.float32)
    inputs = Inputs([x], arguments.columns)
    codes, ways = ("symmetric", ("nearest", "gptq")) if arguments.one_way else ("auto", WAYS)
    wanted = Wanted.of("w4g128", codes, arguments.columns, ways)
    tied = None if arguments.one_way else np.arange(arguments.columns)
    rates = {kind: rate(kind) for kind in ("float64", "float32")}
    seconds = timed(lambda: quantise_product(lambda b, e: weights[b:e], arguments.rows, inputs, wanted, tied))
    squares, others = operations(*size, arguments.tokens, 1 if arguments.one_way else 4)
    peak = peak_memory() / 2**30
    wide = methods._kind_of_squares(arguments.columns).name
    floor = squares / rates[wide] + others / rates["float32"]
    print("| weight | tokens | 10^12 operations | matmuls: float32, float64 | these alone | measured | share | peak |")
    print("|---|---|---|---|---|---|---|---|")
    what = f"{arguments.rows:,} x {arguments.columns:,} | {arguments.tokens:,} | {(squares + others) / 1e12:.2f}"
    print(
        f"| {what} | {rates['float32'] / 1e9:.0f}, {rates['float64'] / 1e9:.0f} Gop/s "
        f"| {floor:.1f} s | {seconds:.1f} s | {floor / seconds:.0%} | {peak:.2f} GiB |"
    )


if __name__ == "__main__":
    main()
