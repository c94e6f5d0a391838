"""Published figures of other engines, and the planner's estimate of each.

The figures are those of TensorRT-LLM's performance overview (versions 0.19 and 1.0) and of NVIDIA's NIM benchmarks. The
overview also tells how many requests each measurement had, and all of these come at once. So an estimate has a begin,
in which nobody decodes, and an end, in which fewer and fewer requests run.

    requests at once   ╱▔▔▔▔▔▔▔▔▔▔▔╲        a model with little memory for keys and values has a long middle,
                      ╱             ╲       one with many stages hardly any
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

from ingot.planner.cost import CacheCost, StepCost
from ingot.planner.device import LINK_REACHED, AttentionLoad, Device, StepLoad, gpu_devices, load_seconds
from tests.programs.gpu_estimate import PUBLISHED


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
_BYTES = {"fp8": 1.0, "fp4": 0.5625}  # of a weight, with scales
_SLOWER = {"fp8": 2, "fp4": 4}  # arithmetic in 16 bits than these
_MOST_ROWS = 2048  # requests in a step of TensorRT-LLM, by default
_MOST_TOKENS = 8192  # tokens in a step, by default
_USED = 0.9  # of the memory
_GROUPS = 8  # into which requests that run at once are divided


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
# How many requests each measurement had.
_REQUESTS = {
    (128, 128): 30000,
    (128, 2048): 3000,
    (128, 4096): 1500,
    (500, 2000): 3000,
    (1000, 1000): 3000,
    (1000, 2000): 1500,
    (2048, 128): 3000,
    (2048, 2048): 1500,
    (5000, 500): 1500,
    (20000, 2000): 1000,
}


def stage_costs(shape: Shape, arithmetic: str, tp: int, pp: int) -> list[StepCost]:
    """Of one rank of each stage, with an FP8 cache, and token table and lm_head in 16 bits in the first and last stage.
    If the layers cannot be divided evenly, the first stages have one more, as in TensorRT-LLM."""
    return [
        _stage_cost(shape, arithmetic, tp, layers=shape.layers // pp + (stage < shape.layers % pp), stage=(stage, pp))
        for stage in range(pp)
    ]


def _stage_cost(shape: Shape, arithmetic: str, tp: int, *, layers: int, stage: tuple[int, int]) -> StepCost:
    """stage: its number, and how many there are."""
    size, h, (number, count) = _BYTES[arithmetic], shape.hidden, stage
    attention = h * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * h * shape.inner
    dense = layers * (attention + (0 if shape.experts else mlp)) / tp
    rows = layers * (attention + mlp * shape.taken) / tp
    table, last = h * shape.vocab / tp, number == count - 1
    cache = CacheCost(
        token_bytes=layers * 2 * shape.kv_heads * shape.head_dim / min(tp, shape.kv_heads),
        operations=4 * layers * shape.heads * shape.head_dim / tp,
    )
    return StepCost(
        resident=size * (dense + layers * shape.experts * mlp / tp) + 2 * table * ((number == 0) + last),
        weights=size * dense,
        head=2 * table * last,
        experts=size * layers * shape.experts * mlp / tp,
        taken=shape.taken / shape.experts if shape.experts else 0.0,
        row_operations=2 * rows,
        logit_operations=_SLOWER[arithmetic] * 2 * table * last,
        caches=(cache,),
        messages=int(not last),
        sent_bytes=2 * h * (not last),
        draws=last,
        layers=layers,
        collectives=2 * layers if tp > 1 else 0,
        met_bytes=2 * h,
        arithmetic=arithmetic,
    )


def devices() -> dict[str, Device]:
    h100 = dataclasses.replace(gpu_devices()["h100"], rates={"fp8": 1979e12, "bf16": 989e12})
    return {
        "h100": h100,
        "h200": dataclasses.replace(h100, name="h200", memory=141e9, bandwidth=4.8e12),
        "b200": dataclasses.replace(
            h100,
            name="b200",
            rates={"fp4": 9000e12, "bf16": 2250e12},
            memory=180e9,
            bandwidth=8e12,
            link_bandwidth=LINK_REACHED * 900e9,
        ),
        "rtx6000": dataclasses.replace(
            h100,
            name="rtx6000",
            rates={"fp4": 2000e12, "bf16": 500e12},
            memory=96e9,
            bandwidth=1.79e12,
            link_seconds=20e-6,
            link_bandwidth=LINK_REACHED * 64e9,
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
    rows += [point("B200, tp 1", M70, "b200", 1000, 1000, 7007), point("B200, tp 1", M70, "b200", 128, 2048, 9925)]
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
    """Tokens per second. A request starts when there is memory for all of its tokens (`GUARANTEED_NO_EVICT`, which
    TensorRT-LLM does by default), and a step has as many requests and tokens as TensorRT-LLM's have at most."""
    costs = stage_costs(point.shape, point.arithmetic, point.tp, point.pp)
    longest = point.given + point.new
    fits = min(int((_USED * device.memory - cost.resident) / cost.sequence_bytes(longest)) for cost in costs)
    at_once = max(1, min(point.batch or _MOST_ROWS * point.pp, fits))
    count = 50 * at_once if point.batch else _REQUESTS[point.given, point.new]  # of few at once others come in turn
    return count * point.new / _run_seconds(costs, device, point, at_once, count)


def _run_seconds(costs: Sequence[StepCost], device: Device, point: Point, at_once: int, count: int) -> float:
    """Of `count` requests. They move in groups: those of a group start together, and have their tokens together."""
    size = max(1, min(at_once, count) // _GROUPS)
    now, waiting = 0.0, count
    prompts = deque[list[float]]()  # groups whose prompts are computed: requests, tokens left
    answers = deque[list[float]]()  # groups that decode: requests, tokens left; the oldest first
    while waiting or prompts or answers:
        decoding = sum(group for group, _ in answers)
        free = at_once - decoding - sum(group for group, _ in prompts)
        while waiting and free >= (group := min(size, waiting)):
            prompts.append([group, group * point.given])
            waiting, free = waiting - group, free - group
        seen = sum(group * (point.given + point.new - left) for group, left in answers)
        pending = sum(left for _, left in prompts)
        seconds, computed = _round_seconds(costs, device, point, decoding, seen, pending)
        rounds = min([left for _, left in (*answers,)[:1]] + [left / computed for _, left in (*prompts,)[:1]])
        now += rounds * seconds
        for each in answers:
            each[1] -= rounds
        if answers and answers[0][1] < 1e-6:
            answers.popleft()
        if prompts:
            prompts[0][1] -= rounds * computed
            if prompts[0][1] < 1e-6:
                answers.append([prompts.popleft()[0], point.new])
    return now


def _round_seconds(
    costs: Sequence[StepCost], device: Device, point: Point, decoding: float, seen: float, pending: float
) -> tuple[float, float]:
    """Seconds in which each request that decodes gets a token, and the tokens of prompts that are computed in them.
    Requests are divided among as many steps as there are stages."""
    turns = len(costs)
    rows = decoding / turns
    tokens = min(pending / turns, max(_MOST_TOKENS, point.given) - rows)
    pairs = tokens * point.given / 2
    ended = tokens / point.given
    load = StepLoad(
        rows=rows + tokens,
        logit_rows=rows + ended,
        sequences=rows + ended,
        attention=(
            AttentionLoad(sequences=rows, seen={0: (seen / turns, seen / turns)}),
            AttentionLoad(sequences=ended, seen={0: (tokens, pairs)}),
        ),
    )
    each = {cost: load_seconds(cost, device, point.tp, load).total for cost in dict.fromkeys(costs)}
    taken = [each[cost] for cost in costs]
    alone = decoding + pending / point.given <= 1  # one request is in one stage at a time
    return max(sum(taken), (1 if alone else turns) * max(taken)), turns * tokens
