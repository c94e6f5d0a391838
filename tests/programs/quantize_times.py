"""Time of quantising one weight by `ingot quantize`, beside the time that its operations need at the rate of matmuls.

python -m tests.programs.quantize_times ROWS COLUMNS [--tokens 8192]

The recipe is w4g128; weights and inputs are random. The rates of float32 and float64 matmuls are measured before.
Operations that grow with rows * columns, such as the search of scales, are not among those counted.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ingot.builder.calibrated import methods
from ingot.builder.calibrated.methods import Inputs, Wanted, quantise_product
from ingot.configs.quantize import DEFAULT_TOKENS

SIDE = 2048  # of the matmuls whose rate is measured


def rate(kind: npt.DTypeLike) -> float:
    """Operations per second of a large matmul; the best of three."""
    a, seconds = np.ones((SIDE, SIDE), kind), []
    for _ in range(3):
        begin = time.perf_counter()
        np.matmul(a, a)
        seconds.append(time.perf_counter() - begin)
    return 2 * SIDE**3 / min(seconds)


def operations(weight_rows: int, columns: int, tokens: int) -> tuple[float, float]:
    """(those of H and of its factor, all others): multiplications and additions of matmuls.

    A loss and the feeding back take rows * columns^2 each, three sweeps and what they begin with eight times that. Two
    sets of levels are tried without and with a fold; what is rounded to the nearest has a loss, and so have the
    outputs themselves, and 256 rows under three folds.
    """
    few = 2 * methods._CHOOSING
    fed = weight_rows + 4 * methods._CHOOSING if weight_rows > few else 4 * weight_rows
    losses = 2 * weight_rows + 3 * min(weight_rows, 256)
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
    arguments = parser.parse_args()
    draw, size = np.random.default_rng(0), (arguments.rows, arguments.columns)
    weights = draw.standard_normal(size, np.float32)
    loud = np.exp(0.7 * draw.standard_normal(arguments.columns)).astype(np.float32)
    inputs = Inputs([draw.standard_normal((arguments.tokens, arguments.columns), np.float32) * loud], arguments.columns)
    wanted, tied = Wanted.of("w4g128", "auto", arguments.columns), np.arange(arguments.columns)
    rates = {kind: rate(kind) for kind in ("float64", "float32")}
    seconds = timed(lambda: quantise_product(lambda b, e: weights[b:e], arguments.rows, inputs, wanted, tied))
    squares, others = operations(*size, arguments.tokens)
    wide = methods._kind_of_squares(arguments.columns).name
    floor = squares / rates[wide] + others / rates["float32"]
    print("| weight | tokens | 10^12 operations | matmuls: float32, float64 | these alone | measured | share |")
    print("|---|---|---|---|---|---|---|")
    what = f"{arguments.rows:,} x {arguments.columns:,} | {arguments.tokens:,} | {(squares + others) / 1e12:.2f}"
    print(
        f"| {what} | {rates['float32'] / 1e9:.0f}, {rates['float64'] / 1e9:.0f} Gop/s "
        f"| {floor:.1f} s | {seconds:.1f} s | {floor / seconds:.0%} |"
    )


if __name__ == "__main__":
    main()
