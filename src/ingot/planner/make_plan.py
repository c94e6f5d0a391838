"""Checkpoint + devices + lengths → what each arrangement of ranks, replicas and precisions would give.

    every precision × tensor parallel size × stages: the builder decides the plan of a rank of each stage ─▶ StepCost
    × device: does it fit? ─▶ formula over batch sizes, together or with prompts apart: TTFT, TPOT, tokens/s, the bound
    the best few ─▶ simulation with the real scheduler: percentiles under the wanted rate

Only what `ingot build` builds is offered: what it refuses is listed with its reason.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ingot.builder.plan_targets import plan_targets
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.dtypes import Precision
from ingot.errors import BuildError, IngotError
from ingot.planner.arrange import CHUNK, MOST_BATCH, Arrangement, Candidate, Goals, RatePoint, Simulation, arrangements
from ingot.planner.cost import plan_cost
from ingot.planner.device import Device, Float64
from ingot.planner.simulate import ReplicaOptions, Served, simulate
from ingot.plugins.registry import find_targets

PRECISIONS = ("bf16", "w8", "w4g128")
MOST_SPLIT = 8  # ranks that divide each layer, and stages
SIMULATED = 3  # arrangements, the best ones
_REQUESTS = 512  # of a simulation of one replica, at most

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """input_len, output_len: tokens of a request. count: devices. rate: requests per second on all of them together.

    ttft, tpot  seconds that the median request may take to its first token, and for each token after it
    simulated_seconds  for so long requests come to all replicas of the best arrangement; None: some requests to one
                       replica of each of the best ones
    rates              at how many rates the simulated arrangements are simulated as well, up to more than they serve
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
    simulated_seconds: float | None = None
    rates: int = 0

    @property
    def goals(self) -> Goals:
        return Goals(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Goals)})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """arrangements: best first. left_out: a line for each that is not possible, with the reason."""

    arrangements: tuple[Arrangement, ...]
    left_out: tuple[str, ...]


def make_plan(options: PlanOptions, progress: Progress) -> PlanReport:
    """Raises CheckpointError, and BuildError where no arrangement is possible."""
    checkpoint = Checkpoint.open(options.checkpoint_dir)
    sizes = [1 << n for n in range(MOST_SPLIT.bit_length())]
    layouts = [(tp, pp) for tp in sizes for pp in sizes if tp * pp <= options.count]
    asked = [(device, name, *layout) for device in options.devices for name in options.precisions for layout in layouts]
    found: list[tuple[Arrangement, Candidate]] = []
    left_out: dict[str, str] = {}  # arrangement → why it is not possible
    for number, (device, precision, tp, pp) in enumerate(asked):
        progress("arrangements", number, len(asked))
        what = f"{device.name}, {precision}, tp {tp}" + (f", pp {pp}" if pp > 1 else "")
        try:
            candidate = _candidate(options, checkpoint, device, precision, tp, pp)
        except IngotError as error:
            left_out[what] = error.what + (f"; expected: {error.expected}" if error.expected else "")
            continue
        apart = tp == pp == 1 and device.target.startswith("cpu")  # other engines refuse --role
        if best := _best(options, candidate, can_be_apart=apart):
            found += [(arrangement, candidate) for arrangement in best]
        else:
            left_out[what] = f"the engine and one sequence do not fit {device.memory / 1e9:.0f} GB"
    if not found:
        raise BuildError(
            "no arrangement of these devices is possible",
            where=", ".join(dict.fromkeys(each.name for each in options.devices)),
            got="; ".join(dict.fromkeys(left_out.values())),
            hint="change what the reasons name: lengths, precisions, devices or their number",
        )
    found.sort(key=lambda each: _order(each[0]))
    made, simulated = [], SIMULATED if options.simulated_seconds is None else 1
    for number, (arrangement, candidate) in enumerate(found):
        if number < simulated:
            served = _simulate(options, arrangement, candidate, progress)
            curve = tuple(_curve(options, arrangement, candidate, progress))
            arrangement = dataclasses.replace(arrangement, simulation=served, curve=curve)
        made.append(arrangement)
    return PlanReport(
        arrangements=tuple(made), left_out=tuple(f"{what}: {reason}" for what, reason in left_out.items())
    )


def _candidate(
    options: PlanOptions, checkpoint: Checkpoint, device: Device, precision: str, tp: int, pp: int
) -> Candidate:
    """Nothing is read of the weights: their sizes decide."""
    quantised = Precision.parse(precision).dtype.is_quantised
    config = BuildConfig(
        target=device.target,
        precision=precision,
        activations="int8" if quantised and device.target.startswith("cpu") else "bf16",
        tp_size=tp,
        pp_size=pp,
        max_batch_size=MOST_BATCH,
        max_num_tokens=max(CHUNK, MOST_BATCH),
        max_input_len=options.input_len,
        max_seq_len=options.input_len + options.output_len,
        autotune=False,
        dry_run=True,
    )
    targets = find_targets(device.target)
    (built,) = plan_targets(config, checkpoint, targets, lambda what, done, total: None, estimate=True)
    stages = tuple(plan_cost(rank.plan) for rank in reversed(built.ranks))  # the last stage has the first ranks
    return Candidate(device=device, precision=precision, tp=tp, pp=pp, plan=built.plan, stages=stages)


def _order(arrangement: Arrangement) -> tuple[bool, float]:
    """Those that meet the goals first; then the cheapest tokens, or the most."""
    speed = arrangement.output_tokens_per_second
    return (not arrangement.meets, -speed if arrangement.cost is None else arrangement.cost)


def _best(options: PlanOptions, candidate: Candidate, *, can_be_apart: bool) -> list[Arrangement]:
    """With the best batch: one where every replica computes its own prompts, and perhaps one with prompts apart."""
    made = list(arrangements(options.goals, candidate, can_be_apart=can_be_apart))
    found = []
    for apart in (False, True):
        own = [each for each in made if bool(each.prefill_replicas) == apart]
        good = [each for each in own if each.meets]
        if good:
            found.append(max(good, key=lambda each: each.output_tokens_per_second))
        elif own:
            found.append(min(own, key=_miss(options)))
    return found


def _miss(options: PlanOptions) -> Callable[[Arrangement], float]:
    """How far an arrangement is from the goals."""

    def miss(each: Arrangement) -> float:
        goals = ((1e-3 * each.ttft_ms, options.ttft), (1e-3 * each.tpot_ms, options.tpot))
        ratios = [found / goal for found, goal in goals if goal]
        if options.rate is not None:
            ratios.append(options.rate * options.output_len / each.output_tokens_per_second)
        return max(ratios)

    return miss


def _simulate(options: PlanOptions, arrangement: Arrangement, candidate: Candidate, progress: Progress) -> Simulation:
    """Requests that arrive at random, or all at once; at all replicas, or at one."""
    servers, helpers = arrangement.replicas, arrangement.prefill_replicas
    one = options.simulated_seconds is None and not helpers
    arrivals = _arrivals(options, arrangement, share=1 / servers if one else 1.0)
    lengths = [(options.input_len, options.output_len)] * len(arrivals)
    count = 1 if one else servers

    def told(done: int) -> None:
        if done % 64 == 0:
            progress("simulated requests", done, len(arrivals))

    own = _replica(arrangement, candidate)
    if helpers:
        served = _simulate_apart(options, arrangement, candidate, arrivals)
    else:
        served = simulate(lengths, arrivals.tolist(), candidate.clock(), own, replicas=count, progress=told)
    progress("simulated requests", len(arrivals), len(arrivals))
    return _percentiles(served, count, scale=servers if one else 1)


def _curve(
    options: PlanOptions, arrangement: Arrangement, candidate: Candidate, progress: Progress
) -> Iterator[RatePoint]:
    """At rates from a tenth of what the arrangement serves by the formula to a fifth more than that."""
    most = arrangement.output_tokens_per_second / options.output_len
    for rate in np.linspace(0.1, 1.2, options.rates) * most:
        own = dataclasses.replace(options, rate=float(rate), simulated_seconds=None)
        found = _simulate(own, arrangement, candidate, progress)
        scale = arrangement.output_tokens_per_second / found.output_tokens_per_second
        cost = None if arrangement.cost is None else arrangement.cost * scale
        yield RatePoint(rate=float(rate), simulation=found, cost=cost)


def _arrivals(options: PlanOptions, arrangement: Arrangement, share: float) -> Float64:
    """Seconds. share: of the rate."""
    count = min(_REQUESTS, max(32, 2 * arrangement.batch))
    if options.rate is None:
        return np.zeros(count)
    if options.simulated_seconds is not None:
        count = max(1, round(options.rate * options.simulated_seconds))
    return np.cumsum(np.random.default_rng(0).exponential(1 / (options.rate * share), count))


def _replica(arrangement: Arrangement, candidate: Candidate, batch: int | None = None) -> ReplicaOptions:
    """With blocks for as many sequences as the batch has."""
    plan, size = candidate.plan, batch or arrangement.batch
    longest = plan.limits.max_seq_len
    return ReplicaOptions(
        limits=dataclasses.replace(plan.limits, max_batch_size=size),
        num_blocks=tuple(group.blocks_of(longest) * size for group in plan.caches),
        tokens_per_block=plan.tokens_per_block,
        windows=tuple(group.window for group in plan.caches),
    )


def _simulate_apart(options: PlanOptions, arrangement: Arrangement, candidate: Candidate, arrivals: Float64) -> Served:
    """Prompts first; each goes on where it generates, when its keys and values are there. The decode server computes
    the tokens of the last block again."""
    given, size = options.input_len, candidate.plan.tokens_per_block
    tail = given - (given - 1) // size * size
    prompts = simulate(
        [(given, 1)] * len(arrivals),
        arrivals.tolist(),
        candidate.clock(),
        _replica(arrangement, candidate),
        replicas=arrangement.prefill_replicas,
    )
    ready = arrivals + prompts.ttft + candidate.handed_seconds(given)
    order = np.argsort(ready, kind="stable")
    served = simulate(
        [(tail, options.output_len)] * len(arrivals),
        ready[order].tolist(),
        candidate.clock(given - tail),
        _replica(arrangement, candidate),
        replicas=arrangement.replicas,
    )
    ttft, tpot = np.empty(len(arrivals)), np.empty(len(arrivals))
    ttft[order], tpot[order] = served.ttft + (ready - arrivals)[order], served.tpot
    return dataclasses.replace(
        served,
        ttft=ttft,
        tpot=tpot,
        seconds=served.seconds + float(ready.min() - arrivals.min()),
        busy=served.busy + prompts.busy,
        steps=served.steps + prompts.steps,
    )


def _percentiles(served: Served, replicas: int, scale: int) -> Simulation:
    """scale: replicas that each serve as many tokens as the simulated ones together."""

    def at(values: Sequence[float] | Float64, share: int) -> float:
        return 1e3 * float(np.percentile(values, share))

    tpot = served.tpot[np.isfinite(served.tpot)]
    return Simulation(
        requests=len(served.ttft),
        replicas=replicas,
        seconds=served.seconds,
        steps=served.steps,
        ttft_ms_p50=at(served.ttft, 50),
        ttft_ms_p90=at(served.ttft, 90),
        tpot_ms_p50=at(tpot, 50) if len(tpot) else None,
        tpot_ms_p90=at(tpot, 90) if len(tpot) else None,
        output_tokens_per_second=scale * served.tokens / served.seconds,
        preemptions=served.preemptions,
    )
