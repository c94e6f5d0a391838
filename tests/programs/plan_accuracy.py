"""How far the estimates of `ingot plan` are off: published figures of GPUs, and an engine on this machine.

python -m tests.programs.plan_accuracy --published
python -m tests.programs.plan_accuracy --engine ENGINE

--published fits four numbers of a device (shares of bandwidth and rate, seconds of a layer and of a request) on figures
of H200, and prints the error of each class of figures that it has not seen. For pipeline stages it fits them again, on
one and four stages of an RTX 6000. The engines of these figures are not ingot's (`published_points.py`).

--engine runs loads of an engine, and simulates them with the real scheduler, which takes the same steps. It fits the
same numbers, the seconds of a call and the overlap on the steps of four loads: seconds of each load, measured and
estimated, and how far its steps are off.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.planner.clock import Clock
from ingot.planner.cost import Int64, StepCost, plan_cost
from ingot.planner.device import Device, Float64, StepLoad, load_seconds, measure_here, step_load
from ingot.planner.simulate import ReplicaOptions, simulate
from ingot.runtime import ModelRunner
from ingot.runtime.reports import StepReport
from ingot.runtime.request import Request
from tests.programs.published_points import devices, points, throughput

FITTED_ON = ("4 short prompts", "16 short prompts", "12 prompts of 128", "8 of mixed lengths")
FITTED = ("bytes_reached", "operations_reached", "layer_seconds", "request_seconds")
FITTED_HERE = (*FITTED, "call_seconds", "overlap")
_CALL_SECONDS = 30e-6  # where its fit begins
_NEAR = 1e-2  # six numbers of few kinds of steps: a number that changes e-fold has to make up for an error of 10 %
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


@dataclasses.dataclass(frozen=True, slots=True)
class StepLog:
    """The steps of a load, in order. loads: what each computes, as simulated; seconds: as measured, the median of the
    rounds; calls: the share that each step has of a call of the session."""

    loads: list[StepLoad]
    seconds: Float64
    calls: Float64

    def estimate(self, cost: StepCost, device: Device) -> Float64:
        """Seconds of each step."""
        found = [load_seconds(cost, device, 1, load).total for load in self.loads]
        return np.array(found) + self.calls * device.call_seconds


def measure(runner: ModelRunner, lengths: Sequence[tuple[int, int]], seed: int) -> list[StepReport]:
    """The steps of a load whose requests come at once."""
    random, steps = np.random.default_rng(seed), list[StepReport]()
    runner.executor.report_to(steps.append)
    vocab = runner.model_info.vocab_size
    requests = [Request(random.integers(0, vocab, given, dtype=np.int32), max_new_tokens=new) for given, new in lengths]
    runner.executor.complete(requests)
    return steps


def simulated_steps(runner: ModelRunner, lengths: Sequence[tuple[int, int]]) -> list[tuple[Int64, Int64, int]]:
    """Tokens before and new tokens of each sequence, and rows of logits, of each step that the scheduler takes."""
    plan, found = runner.engine.plan, list[tuple[Int64, Int64, int]]()

    def step(past: Int64, new: Int64, rows: int) -> list[float]:
        found.append((past.copy(), new.copy(), rows))
        return [1.0]

    options = ReplicaOptions(
        limits=runner.model_info.limits,
        num_blocks=tuple(pool.num_blocks for pool in runner.blocks.pools),
        tokens_per_block=plan.tokens_per_block,
        windows=tuple(group.window for group in plan.caches),
        prefill_chunk=512,
    )
    simulate(lengths, [0.0] * len(lengths), Clock(step=step), options)
    return found


def step_log(
    rounds: Sequence[Sequence[StepReport]], simulated: Sequence[tuple[Int64, Int64, int]], windows: set[int]
) -> StepLog:
    """What was measured and what was simulated, together. Raises ValueError where the steps are not the same."""
    expected = [int(new.sum()) for _, new, _ in simulated]
    seconds, calls = [], []
    for reports in rounds:
        steps = [report for report in reports for _ in range(report.steps)]
        if [step.prefill_tokens + step.decode_rows for step in steps] != expected:
            raise ValueError("the engine took other steps than the simulation")
        seconds.append([step.schedule_seconds + step.session_seconds + step.finish_seconds for step in steps])
        calls.append([1 / step.steps for step in steps])
    return StepLog(
        [step_load(*step, windows) for step in simulated], np.median(seconds, axis=0), np.median(calls, axis=0)
    )


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
        device, cost = measure_here(), plan_cost(runner.engine.plan)
        taken: dict[str, list[list[StepReport]]] = {name: [] for name in loads()}
        for turn in range(rounds + 1):
            for name, lengths in loads().items():
                steps = measure(runner, lengths, turn)
                if turn:
                    taken[name].append(steps)
        windows = {cache.window for cache in cost.caches}
        logs = {name: step_log(taken[name], simulated_steps(runner, own), windows) for name, own in loads().items()}

    # The weights of a small model lie in the CPUs' caches, which are faster than the memory.
    begin = dataclasses.replace(device, call_seconds=_CALL_SECONDS)
    start = [getattr(begin, name) for name in FITTED_HERE]

    def error(numbers: Sequence[float]) -> float:
        if numbers[FITTED_HERE.index("overlap")] < 1:
            return math.inf
        found = _NEAR * sum(math.log(number / first) ** 2 for number, first in zip(numbers, start, strict=True))
        for log in (logs[name] for name in FITTED_ON):
            off = np.log(log.estimate(cost, fitted(device, numbers)) / log.seconds)
            found += float(np.average(off**2, weights=log.seconds))
        return found

    numbers = fit(error, start)
    print(", ".join(f"{name} {number:.3g}" for name, number in zip(FITTED_HERE, numbers, strict=True)))
    print("| load | steps | measured s | estimated s | error | median error of a step |\n|---|---|---|---|---|---|")
    for name, log in logs.items():
        found = log.estimate(cost, fitted(device, numbers))
        own, whole, step = log.seconds.sum(), found.sum(), np.median(np.abs(found / log.seconds - 1))
        used = ", fitted on" if name in FITTED_ON else ""
        print(f"| {name}{used} | {len(found)} | {own:.3f} | {whole:.3f} | {whole / own - 1:+.0%} | {step:.0%} |")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if given.published == (given.engine is not None):
        parser.error("expected --published, or --engine ENGINE")
    if given.published:
        published()
    else:
        engine(given.engine, given.rounds)


if __name__ == "__main__":
    main()
