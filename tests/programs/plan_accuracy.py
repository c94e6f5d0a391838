"""How far the estimates of `ingot plan` are off: published figures of GPUs, and an engine on this machine.

python -m tests.programs.plan_accuracy --published
python -m tests.programs.plan_accuracy --engine ENGINE

--published fits four numbers of a device (shares of bandwidth and rate, seconds of a layer and of a request) on figures
of H200, and prints the error of each class of figures that it has not seen. For pipeline stages it fits them again, on
one and four stages of an RTX 6000. The engines of these figures are not ingot's (`published_points.py`).

--engine runs loads of an engine, fits the same numbers and the seconds of a call on four of them, and simulates all
with the real scheduler: seconds of each load, measured and estimated.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.planner.clock import stages_clock
from ingot.planner.cost import plan_cost
from ingot.planner.device import Device, measure_here
from ingot.planner.simulate import ReplicaOptions, simulate
from ingot.runtime import ModelRunner
from ingot.runtime.reports import StepReport
from ingot.runtime.request import Request
from tests.programs.published_points import devices, points, throughput

FITTED_ON = ("4 short prompts", "16 short prompts", "12 prompts of 128", "8 of mixed lengths")
FITTED = ("bytes_reached", "operations_reached", "layer_seconds", "request_seconds")
FITTED_HERE = (*FITTED, "call_seconds")
_CALL_SECONDS = 30e-6  # where its fit begins
_NEAR = 1e-4  # five numbers of four loads: a number that changes e-fold has to make up for an error of 1 %
SHARES = 2  # of these, the first, are shares of the data sheet's figures


def fit(
    error: Callable[[Sequence[float]], float], start: Sequence[float], most_shares: float = math.inf
) -> list[float]:
    """The numbers with the least error near `start`: some are made larger, others smaller, in finer steps.

    Two of them at once: where no number by itself lowers the error, two together may. most_shares: what the shares may
    be at most.
    """
    best, least, step = list(start), error(start), 2.0
    ways = [way for way in itertools.product((-1, 0, 1), repeat=len(best)) if len(best) - way.count(0) in (1, 2)]
    while step > 1.005:
        tried = ([number * step**each for number, each in zip(best, way, strict=True)] for way in ways)
        found = {error(each): each for each in tried if max(each[:SHARES]) <= most_shares}
        if found and min(found) < least:
            least = min(found)
            best = found[least]
        else:
            step **= 0.5
    return best


def fitted(device: Device, numbers: Sequence[float]) -> Device:
    """With these numbers, in the order of FITTED_HERE, of which the last may be left out."""
    named: dict[str, Any] = dict(zip(FITTED_HERE, numbers, strict=False))
    return dataclasses.replace(device, **named)


def published() -> None:
    """The table of errors, by class."""
    known, rows = devices(), points()

    def errors(numbers: Sequence[float], kind: str) -> list[float]:
        own = [row for row in rows if row.kind == kind]
        return [throughput(row, fitted(known[row.device], numbers)) / row.found - 1 for row in own]

    kinds = list(dict.fromkeys(row.kind for row in rows))
    numbers: list[float] = []
    unseen: dict[str, list[float]] = {"tp": [], "pp": []}
    print("| class | figures | median error | worst | bias |\n|---|---|---|---|---|")
    for kind in kinds:
        if kind.endswith("fitted on"):  # and so are those behind it, on no figures of their own

            def error(numbers: Sequence[float], kind: str = kind) -> float:
                return statistics.mean(abs(math.log1p(each)) for each in errors(numbers, kind))

            numbers = fit(error, [getattr(known["h200"], name) for name in FITTED], most_shares=1.0)
            said = (f"{name} {number:.3g}" for name, number in zip(FITTED, numbers, strict=True))
            print(f"{kind}: {', '.join(said)}", file=sys.stderr)
        found = errors(numbers, kind)
        print(_line(kind, found))
        if not kind.endswith("fitted on"):
            own = [row for row in rows if row.kind == kind]
            for name, several in (("tp", [row.tp > 1 for row in own]), ("pp", [row.pp > 1 for row in own])):
                unseen[name] += [each for each, counts in zip(found, several, strict=True) if counts]
    for name, found in unseen.items():
        print(_line(f"all with {name} of 2 or more that nothing was fitted on", found))


def _line(kind: str, found: Sequence[float]) -> str:
    sizes = [abs(each) for each in found]
    bias = statistics.mean(found)
    return f"| {kind} | {len(found)} | {statistics.median(sizes):.0%} | {max(sizes):.0%} | {bias:+.0%} |"


def measure(runner: ModelRunner, lengths: Sequence[tuple[int, int]], seed: int) -> tuple[float, list[StepReport]]:
    """Seconds of a load whose requests come at once, and its steps."""
    random, steps = np.random.default_rng(seed), list[StepReport]()
    runner.executor.report_to(steps.append)
    vocab = runner.model_info.vocab_size
    requests = [Request(random.integers(0, vocab, given, dtype=np.int32), max_new_tokens=new) for given, new in lengths]
    begin = time.perf_counter()
    runner.executor.complete(requests)
    return time.perf_counter() - begin, steps


def loads() -> dict[str, list[tuple[int, int]]]:
    """Requests of (prompt tokens, generated tokens) by name; those in FITTED_ON are what is fitted on."""
    random = np.random.default_rng(5)
    drawn = [(int(random.integers(8, 200)), int(random.integers(8, 100))) for _ in range(48)]
    return {
        "4 short prompts": [(16, 64)] * 4,
        "16 short prompts": [(16, 64)] * 16,
        "12 prompts of 128": [(128, 4)] * 12,
        "8 of mixed lengths": drawn[:8],
        "32 short prompts, long answers": [(16, 120)] * 32,
        "32 long prompts, short answers": [(200, 8)] * 32,
        "48 of mixed lengths": drawn,
    }


def engine(directory: Path, rounds: int) -> None:
    """The table of loads."""
    with ModelRunner.from_dir(directory, enable_prefix_cache=False) as runner:
        plan, device = runner.engine.plan, measure_here()
        cost, limits = plan_cost(plan), runner.model_info.limits
        blocks = [pool.num_blocks for pool in runner.blocks.pools]

        def estimate(lengths: Sequence[tuple[int, int]], numbers: Sequence[float]) -> float:
            options = ReplicaOptions(
                limits=limits,
                num_blocks=tuple(blocks),
                tokens_per_block=plan.tokens_per_block,
                windows=tuple(group.window for group in plan.caches),
                prefill_chunk=512,
            )
            clock = stages_clock([cost], fitted(device, numbers), 1)
            return simulate(lengths, [0.0] * len(lengths), clock, options).seconds

        taken: dict[str, list[float]] = {name: [] for name in loads()}
        for turn in range(rounds + 1):
            for name, lengths in loads().items():
                seconds, _ = measure(runner, lengths, turn)
                if turn:
                    taken[name].append(seconds)
        medians = {name: statistics.median(each) for name, each in taken.items()}

        # The weights of a small model lie in the CPUs' caches, which are faster than the memory.
        start = [*(getattr(device, name) for name in FITTED), _CALL_SECONDS]

        def error(numbers: Sequence[float]) -> float:
            own = {name: loads()[name] for name in FITTED_ON}
            found = sum(math.log(estimate(each, numbers) / medians[name]) ** 2 for name, each in own.items())
            return found + _NEAR * sum(
                math.log(number / first) ** 2 for number, first in zip(numbers, start, strict=True)
            )

        numbers = fit(error, start)
    print(", ".join(f"{name} {number:.3g}" for name, number in zip(FITTED_HERE, numbers, strict=True)))
    print("| load | measured s | half of the rounds | estimated s | error |\n|---|---|---|---|---|")
    for name, lengths in loads().items():
        found, own = estimate(lengths, numbers), medians[name]
        low, high = (float(np.percentile(taken[name], each)) for each in (25, 75))
        used = ", fitted on" if name in FITTED_ON else ""
        print(f"| {name}{used} | {own:.3f} | {low:.3f} to {high:.3f} | {found:.3f} | {found / own - 1:+.0%} |")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.published == (given.engine is not None):
        parser.error("expected --published, or --engine ENGINE")
    if given.published:
        published()
    else:
        engine(given.engine, given.rounds)


if __name__ == "__main__":
    main()
