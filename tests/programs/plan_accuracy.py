"""How far the estimates of `ingot plan` are off: published figures of GPUs, and an engine on this machine.

python -m tests.programs.plan_accuracy --published
python -m tests.programs.plan_accuracy --engine ENGINE

--published fits four numbers of a device (shares of bandwidth and rate, seconds of a layer and of a request) on figures
of H200, and prints the error of each class of figures that it has not seen. For pipeline stages it fits them again, on
one and four stages of an RTX 6000. The figures are those of TensorRT-LLM's
performance overview (versions 0.19 and 1.0) and of NVIDIA's NIM benchmarks, whose engines are not ingot's.

--engine runs loads of an engine, fits the same numbers on three of them, and simulates all with the real scheduler:
seconds of each load, measured and estimated.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ingot.planner.cost import CacheCost, Int64, StepCost, plan_cost
from ingot.planner.device import Device, gpu_devices, measure_here, step_seconds
from ingot.planner.simulate import Clock, ReplicaOptions, simulate
from ingot.runtime import ModelRunner
from ingot.runtime.reports import StepReport
from ingot.runtime.request import Request
from tests.programs.gpu_estimate import PUBLISHED

FITTED_ON = ("4 short prompts", "16 short prompts", "12 prompts of 128")
FITTED = ("bytes_reached", "operations_reached", "layer_seconds", "request_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model, as its config.json has it. experts, taken: 0 and 1 of a model without."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int = 128256
    head_dim: int = 128
    experts: int = 0
    taken: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A published figure: output tokens per second."""

    kind: str
    shape: Shape
    device: str
    arithmetic: str
    given: int
    new: int
    found: float
    tp: int = 1
    pp: int = 1
    batch: int | None = None


M8 = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, inner=14336)
M70 = Shape(layers=80, hidden=8192, heads=64, kv_heads=8, inner=28672)
M405 = Shape(layers=126, hidden=16384, heads=128, kv_heads=8, inner=53248)
A3B = Shape(layers=48, hidden=2048, heads=32, kv_heads=4, inner=768, vocab=151936, experts=128, taken=8)
_BITS = {"fp8": 1.0, "fp4": 0.5625}  # bytes of a weight, with scales
_MOST = 2048  # requests at once
_USED = 0.9  # of the memory


STAGES_FITTED = "RTX 6000, 70B, pp 1 and 4, fitted on"
# Of TensorRT-LLM's performance overview: (prompt, answer) → tokens/s with 1, 2, 4 and 8 pipeline stages.
_STAGES = {
    (128, 128): (3264, 6172, 9641, 11881),
    (128, 2048): (2422, 4993, 7922, 9833),
    (128, 4096): (1349, 2893, 4978, 7352),
    (500, 2000): (1856, 4114, 6939, 9435),
    (1000, 1000): (1787, 3707, 5961, 8166),
    (1000, 2000): (1594, 2993, 5274, 6943),
    (2048, 128): (393, 813, 1511, 2495),
    (2048, 2048): (1074, 2336, 3870, 6078),
    (5000, 500): (401, 812, 1511, 2491),
    (20000, 2000): (142, 319, 630, 1148),
}
_405B = {
    (128, 128): 4452,
    (128, 2048): 2981,
    (1000, 1000): 2369,
    (1000, 2000): 1931,
    (2048, 128): 579,
    (2048, 2048): 1442,
}
# How many requests each measurement had, where these are fewer than may run at once.
_REQUESTS = {(128, 4096): 1500, (1000, 2000): 1500, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000}


def shape_cost(shape: Shape, arithmetic: str, tp: int, pp: int) -> StepCost:
    """Of one rank of one stage, with an FP8 cache and lm_head in 16 bits on every stage's share."""
    size, layers, h = _BITS[arithmetic], shape.layers / pp, shape.hidden
    attention = h * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * h * shape.inner
    dense = layers * (attention + (0 if shape.experts else mlp)) / tp
    rows = layers * (attention + mlp * shape.taken) / tp
    head = h * shape.vocab / tp / pp
    cache = CacheCost(
        token_bytes=layers * 2 * shape.kv_heads * shape.head_dim / min(tp, shape.kv_heads),
        operations=4 * layers * shape.heads * shape.head_dim / tp,
    )
    return StepCost(
        resident=size * (dense + layers * shape.experts * mlp / tp) + 4 * head,
        weights=size * dense,
        head=2 * head,
        experts=size * layers * shape.experts * mlp / tp,
        taken=shape.taken / shape.experts if shape.experts else 0.0,
        row_operations=2 * rows,
        logit_operations=2 * head,
        caches=(cache,),
        messages=int(pp > 1),
        sent_bytes=2 * h if pp > 1 else 0,
        layers=round(layers),
        collectives=round(2 * layers) if tp > 1 else 0,
        met_bytes=2 * h,
        arithmetic=arithmetic,
    )


def _devices() -> dict[str, Device]:
    h100 = dataclasses.replace(gpu_devices()["h100"], rates={"fp8": 1979e12, "bf16": 989e12})
    return {
        "h100": h100,
        "h200": dataclasses.replace(h100, name="h200", memory=141e9, bandwidth=4.8e12),
        "b200": dataclasses.replace(
            h100, name="b200", rates={"fp4": 9000e12, "bf16": 2250e12}, memory=180e9, bandwidth=8e12
        ),
        "rtx6000": dataclasses.replace(
            h100,
            name="rtx6000",
            rates={"fp4": 2000e12, "bf16": 500e12},
            memory=96e9,
            bandwidth=1.79e12,
            link_seconds=20e-6,
            link_bandwidth=25e9,
        ),
    }


def points() -> list[Point]:
    """Every figure, by class; the first class is what is fitted on."""

    def point(kind: str, shape: Shape, device: str, given: int, new: int, found: float, **more: int) -> Point:
        arithmetic = "fp8" if device[0] == "h" else "fp4"
        return Point(
            kind=kind, shape=shape, device=device, arithmetic=arithmetic, given=given, new=new, found=found, **more
        )

    rows = [point("H200, fitted on", M8, "h200", *lengths, h200) for lengths, (h200, _) in PUBLISHED.items()]
    rows += [point("H200, fitted on", M70, "h200", 2048, 2048, 2003)]
    rows += [point("H200, fitted on", M405, "h200", 1000, 2000, 3722, tp=8)]
    rows += [point("H100, tp 1", M8, "h100", *lengths, h100) for lengths, (_, h100) in PUBLISHED.items()]
    rows += [point("H100, tp 2 and 8", M70, "h100", 2048, 2048, 3082, tp=2)]
    rows += [point("H100, tp 2 and 8", M405, "h100", 1000, 2000, 2895, tp=8)]
    tokens = {1: 52, 5: 218, 25: 623, 50: 814}
    rows += [
        point("H100, tp 2, few at once", M70, "h100", 5000, 500, found, tp=2, batch=batch)
        for batch, found in tokens.items()
    ]
    rows += [point("B200, tp 1", M70, "b200", 1000, 1000, 7007)]
    b200 = {2: 15460, 4: 23609, 8: 30743}
    rows += [point("B200, tp 2 to 8", M70, "b200", 128, 2048, found, tp=tp) for tp, found in b200.items()]
    rtx = {1: 9910, 2: 16431, 4: 24046, 8: 31785}
    rows += [
        point("RTX 6000, experts, tp 1 to 8", A3B, "rtx6000", 1000, 1000, found, tp=tp) for tp, found in rtx.items()
    ]
    for lengths, stages in _STAGES.items():
        for pp, found in zip((1, 2, 4, 8), stages, strict=True):
            kind = STAGES_FITTED if pp in (1, 4) else f"RTX 6000, 70B, pp {pp}"
            rows.append(point(kind, M70, "rtx6000", *lengths, found, pp=pp))
    rows += [point("RTX 6000, 405B, pp 8", M405, "rtx6000", *lengths, found, pp=8) for lengths, found in _405B.items()]
    return sorted(rows, key=lambda row: row.kind.startswith("RTX 6000,"))


def throughput(point: Point, device: Device) -> float:
    """Tokens per second where as many requests run as fit. Stages: as many micro-batches as stages, none of which ever
    waits."""
    cost = shape_cost(point.shape, point.arithmetic, point.tp, point.pp)
    room = _USED * device.memory - cost.resident
    fits = int(room / cost.sequence_bytes(point.given + point.new // 2))
    batch = max(1, min(point.batch or _MOST, fits, _REQUESTS.get((point.given, point.new), _MOST)))
    rows = max(1, batch // point.pp)
    prompts = round(rows * point.given / point.new)
    past = np.array([point.given + point.new // 2] * rows + [0], np.int64)
    new = np.array([1] * rows + [max(1, prompts)], np.int64)
    return rows / step_seconds(cost, device, point.tp, past, new, rows + 1).total


def fit(error: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """The numbers with the least error near `start`: one after another is made larger or smaller, in finer steps."""
    best, least, step = list(start), error(start), 2.0
    while step > 1.005:
        moved = False
        for at in range(len(best)):
            for factor in (step, 1 / step):
                tried = [each * factor if index == at else each for index, each in enumerate(best)]
                if (found := error(tried)) < least:
                    best, least, moved = tried, found, True
        step = step if moved else step**0.5
    return best


def _with(device: Device, numbers: Sequence[float]) -> Device:
    reached, computed, layer, request = numbers
    return dataclasses.replace(
        device, bytes_reached=reached, operations_reached=computed, layer_seconds=layer, request_seconds=request
    )


def published() -> None:
    """The table of errors, by class."""
    devices, rows = _devices(), points()

    def errors(numbers: Sequence[float], kind: str) -> list[float]:
        own = [row for row in rows if row.kind == kind]
        return [throughput(row, _with(devices[row.device], numbers)) / row.found - 1 for row in own]

    kinds = list(dict.fromkeys(row.kind for row in rows))
    numbers: list[float] = []
    print("| class | figures | median error | worst | bias |\n|---|---|---|---|---|")
    for kind in kinds:
        if kind.endswith("fitted on"):  # and so are those behind it, on no figures of their own

            def error(numbers: Sequence[float], kind: str = kind) -> float:
                return statistics.mean(abs(math.log1p(each)) for each in errors(numbers, kind))

            numbers = fit(error, [getattr(devices["h200"], name) for name in FITTED])
            said = (f"{name} {number:.3g}" for name, number in zip(FITTED, numbers, strict=True))
            print(f"{kind}: {', '.join(said)}", file=sys.stderr)
        found = errors(numbers, kind)
        sizes = [abs(each) for each in found]
        bias = statistics.mean(found)
        print(f"| {kind} | {len(found)} | {statistics.median(sizes):.0%} | {max(sizes):.0%} | {bias:+.0%} |")


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
            own = _with(device, numbers)

            def clock(past: Int64, new: Int64, rows: int) -> list[float]:
                return [step_seconds(cost, own, 1, past, new, rows).total]

            options = ReplicaOptions(
                limits=limits,
                num_blocks=tuple(blocks),
                tokens_per_block=plan.tokens_per_block,
                windows=tuple(group.window for group in plan.caches),
                prefill_chunk=512,
            )
            return simulate(lengths, [0.0] * len(lengths), Clock(step=clock), options).seconds

        taken: dict[str, list[float]] = {name: [] for name in loads()}
        for turn in range(rounds + 1):
            for name, lengths in loads().items():
                seconds, _ = measure(runner, lengths, turn)
                if turn:
                    taken[name].append(seconds)
        medians = {name: statistics.median(each) for name, each in taken.items()}

        def error(numbers: Sequence[float]) -> float:
            own = {name: loads()[name] for name in FITTED_ON}
            return max(abs(math.log(estimate(each, numbers) / medians[name])) for name, each in own.items())

        numbers = fit(error, [getattr(device, name) for name in FITTED])
    print(", ".join(f"{name} {number:.3g}" for name, number in zip(FITTED, numbers, strict=True)))
    print("| load | measured s | half of the rounds | estimated s | error |\n|---|---|---|---|---|")
    for name, lengths in loads().items():
        found, own = estimate(lengths, numbers), medians[name]
        low, high = (float(np.percentile(taken[name], each)) for each in (25, 75))
        fitted = ", fitted on" if name in FITTED_ON else ""
        print(f"| {name}{fitted} | {own:.3f} | {low:.3f} to {high:.3f} | {found:.3f} | {found / own - 1:+.0%} |")


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
