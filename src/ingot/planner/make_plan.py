"""Checkpoint + devices + lengths → what each arrangement of ranks, replicas and precisions would give.

    every precision × tensor parallel size: the builder decides the plan of a rank ─▶ StepCost
    × device: does it fit? ─▶ formula over batch sizes: TTFT, TPOT, tokens/s, what bounds them
    the best few ─▶ simulation with the real scheduler: percentiles under the wanted rate

Only what `ingot build` builds is offered: what it refuses is listed with its reason.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ingot.builder.plan_targets import plan_targets
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.dtypes import Precision
from ingot.errors import BuildError, IngotError
from ingot.plan import Plan
from ingot.planner.cost import Int64, StepCost, plan_cost
from ingot.planner.device import Device, StepSeconds, step_seconds
from ingot.planner.simulate import Served, simulate
from ingot.plugins.registry import find_targets

PRECISIONS = ("bf16", "w8", "w4g128")
MOST_RANKS, MEMORY_USED = 8, 0.9
CHUNK = 2048  # tokens of a step
MOST_BATCH = 1024
SIMULATED = 3  # arrangements, the best ones
_REQUESTS = 512  # of a simulation, at most

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """input_len, output_len: tokens of a request. count: devices. rate: requests per second on all of them together.

    ttft, tpot  seconds that the median request may take to its first token, and for each token after it
    """

    checkpoint_dir: Path
    devices: tuple[Device, ...]
    input_len: int
    output_len: int
    count: int = 1
    rate: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    precisions: tuple[str, ...] = PRECISIONS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Percentiles of requests in milliseconds, of one replica; tokens per second of all replicas."""

    requests: int
    ttft_ms_p50: float
    ttft_ms_p90: float
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    output_tokens_per_second: float
    preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """One way to use the devices, at the batch that gives most tokens within the goals.

    batch       requests that run at once on a replica; most_batch: for which there is memory
    bound       what takes most of a step: memory, compute, links or host
    cost        of a million generated tokens, in the currency of the device's price; None without a price
    meets       the goals, by the formula
    """

    device: str
    precision: str
    tp: int
    pp: int
    replicas: int
    batch: int
    most_batch: int
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_second: float
    cost: float | None
    bound: str
    meets: bool
    simulation: Simulation | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """arrangements: best first. left_out: a line for each that is not possible, with the reason."""

    arrangements: tuple[Arrangement, ...]
    left_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    device: Device
    precision: str
    tp: int
    plan: Plan
    cost: StepCost


def make_plan(options: PlanOptions, progress: Progress) -> PlanReport:
    """Raises CheckpointError, and BuildError where no arrangement is possible."""
    checkpoint = Checkpoint.open(options.checkpoint_dir)
    ranks = [1 << n for n in range(MOST_RANKS.bit_length()) if 1 << n <= min(options.count, MOST_RANKS)]
    asked = [(device, name, tp) for device in options.devices for name in options.precisions for tp in ranks]
    found: list[tuple[Arrangement, _Candidate]] = []
    left_out: dict[str, str] = {}  # arrangement → why it is not possible
    for number, (device, precision, tp) in enumerate(asked):
        progress("arrangements", number, len(asked))
        what = f"{device.name}, {precision}, tp {tp}"
        try:
            plan = _rank_plan(options, checkpoint, device, precision, tp)
        except IngotError as error:
            left_out[what] = error.what + (f"; expected: {error.expected}" if error.expected else "")
            continue
        candidate = _Candidate(device=device, precision=precision, tp=tp, plan=plan, cost=plan_cost(plan))
        arrangement = _best_batch(options, candidate)
        if arrangement is None:
            left_out[what] = f"the engine and one sequence do not fit {device.memory / 1e9:.0f} GB"
        else:
            found.append((arrangement, candidate))
    if not found:
        raise BuildError(
            "no arrangement of these devices is possible",
            where=", ".join(dict.fromkeys(each.name for each in options.devices)),
            got="; ".join(dict.fromkeys(left_out.values())),
            hint="change what the reasons name: lengths, precisions, devices or their number",
        )
    found.sort(key=lambda each: _order(each[0]))
    made = []
    for number, (arrangement, candidate) in enumerate(found):
        progress("simulations", min(number, SIMULATED), SIMULATED)
        if number < SIMULATED:
            served = _simulate(options, arrangement, candidate)
            arrangement = dataclasses.replace(arrangement, simulation=served)
        made.append(arrangement)
    progress("simulations", SIMULATED, SIMULATED)
    return PlanReport(
        arrangements=tuple(made), left_out=tuple(f"{what}: {reason}" for what, reason in left_out.items())
    )


def _rank_plan(options: PlanOptions, checkpoint: Checkpoint, device: Device, precision: str, tp: int) -> Plan:
    """The plan of one rank. Nothing is read of the weights: their sizes decide."""
    quantised = Precision.parse(precision).dtype.is_quantised
    config = BuildConfig(
        target=device.target,
        precision=precision,
        activations="int8" if quantised and device.target.startswith("cpu") else "bf16",
        tp_size=tp,
        max_batch_size=MOST_BATCH,
        max_num_tokens=max(CHUNK, MOST_BATCH),
        max_input_len=options.input_len,
        max_seq_len=options.input_len + options.output_len,
        autotune=False,
        dry_run=True,
    )
    (built,) = plan_targets(config, checkpoint, find_targets(device.target), lambda what, done, total: None)
    return built.plan


def _order(arrangement: Arrangement) -> tuple[bool, float]:
    """Those that meet the goals first; then the cheapest tokens, or the most."""
    speed = arrangement.output_tokens_per_second
    return (not arrangement.meets, -speed if arrangement.cost is None else arrangement.cost)


def _best_batch(options: PlanOptions, candidate: _Candidate) -> Arrangement | None:
    """None where not even one sequence fits."""
    device, cost = candidate.device, candidate.cost
    free = MEMORY_USED * device.memory - cost.resident
    most = min(MOST_BATCH, int(free / max(1.0, cost.sequence_bytes(options.input_len + options.output_len))))
    if most < 1:
        return None
    sizes = sorted({min(most, 1 << n) for n in range(MOST_BATCH.bit_length())})
    made = [_arrangement(options, candidate, size, most) for size in sizes]
    good = [each for each in made if each.meets]
    return max(good, key=lambda each: each.output_tokens_per_second) if good else min(made, key=_miss(options))


def _miss(options: PlanOptions) -> Callable[[Arrangement], float]:
    """How far an arrangement is from the goals."""

    def miss(each: Arrangement) -> float:
        goals = ((1e-3 * each.ttft_ms, options.ttft), (1e-3 * each.tpot_ms, options.tpot))
        ratios = [found / goal for found, goal in goals if goal]
        if options.rate is not None:
            ratios.append(options.rate * options.output_len / each.output_tokens_per_second)
        return max(ratios)

    return miss


def _arrangement(options: PlanOptions, candidate: _Candidate, batch: int, most: int) -> Arrangement:
    """By the formula: `batch` requests at different places of their answers, and prompts that come in between."""
    device, given, new = candidate.device, options.input_len, options.output_len
    replicas = options.count // candidate.tp
    prompts = round(batch * given / new)  # tokens of prompts beside each decode step, in the long run
    step = _step(candidate, batch, given + new // 2, prompts)
    chunks = [min(CHUNK, given - begin) for begin in range(0, given, CHUNK)]
    alone = [_step(candidate, 0, 0, chunk, begin=CHUNK * index).total for index, chunk in enumerate(chunks)]
    ttft = sum(alone) + (step.total / 2 if batch > 1 else 0.0)
    speed = replicas * batch / step.total
    good = (options.ttft is None or ttft <= options.ttft) and (options.tpot is None or step.total <= options.tpot)
    enough = options.rate is None or speed >= options.rate * new
    hourly = device.price * replicas * candidate.tp
    return Arrangement(
        device=device.name,
        precision=candidate.precision,
        tp=candidate.tp,
        pp=1,
        replicas=replicas,
        batch=batch,
        most_batch=most,
        ttft_ms=1e3 * ttft,
        tpot_ms=1e3 * step.total,
        output_tokens_per_second=speed,
        cost=1e6 * hourly / 3600 / speed if device.price else None,
        bound=step.bound,
        meets=good and enough,
    )


def _step(candidate: _Candidate, rows: int, past: int, prompt: int, begin: int = 0) -> StepSeconds:
    """Decode rows after `past` tokens, and `prompt` tokens of prompts after `begin` others."""
    before = np.array([past] * rows + [begin] * (prompt > 0), np.int64)
    new = np.array([1] * rows + [prompt] * (prompt > 0), np.int64)
    return step_seconds(candidate.cost, candidate.device, candidate.tp, before, new, len(new))


def _simulate(options: PlanOptions, arrangement: Arrangement, candidate: _Candidate) -> Simulation:
    """One replica, whose requests arrive at random, or all at once."""
    count = min(_REQUESTS, max(32, 2 * arrangement.batch))
    arrivals = np.zeros(count)
    if options.rate is not None:
        gaps = np.random.default_rng(0).exponential(arrangement.replicas / options.rate, count)
        arrivals = np.cumsum(gaps)
    plan, tp = candidate.plan, candidate.tp
    limits = dataclasses.replace(plan.limits, max_batch_size=arrangement.batch)
    longest = options.input_len + options.output_len
    blocks = [group.blocks_of(longest) * arrangement.batch for group in plan.caches]

    def clock(past: Int64, new: Int64, rows: int) -> float:
        return step_seconds(candidate.cost, candidate.device, tp, past, new, rows).total

    served = simulate(
        [(options.input_len, options.output_len)] * count,
        arrivals.tolist(),
        clock,
        limits=limits,
        num_blocks=blocks,
        tokens_per_block=plan.tokens_per_block,
        windows=[group.window for group in plan.caches],
    )
    return _percentiles(served, arrangement.replicas)


def _percentiles(served: Served, replicas: int) -> Simulation:
    tpot = 1e3 * served.tpot[np.isfinite(served.tpot)]
    return Simulation(
        requests=len(served.ttft),
        ttft_ms_p50=1e3 * float(np.percentile(served.ttft, 50)),
        ttft_ms_p90=1e3 * float(np.percentile(served.ttft, 90)),
        tpot_ms_p50=float(np.percentile(tpot, 50)) if len(tpot) else None,
        tpot_ms_p90=float(np.percentile(tpot, 90)) if len(tpot) else None,
        output_tokens_per_second=replicas * served.tokens / served.seconds,
        preemptions=served.preemptions,
    )
