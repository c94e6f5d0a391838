"""One way to divide a model among devices, and what it gives by the formula.

together   every replica computes prompts and answers; the stages of one work at different steps at once
apart      some servers compute prompts, and hand the keys and values to others, which generate
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ingot.plan import Plan
from ingot.planner.clock import Clock, stages_clock
from ingot.planner.cost import StepCost
from ingot.planner.device import PARTS, Device, StepSeconds, step_seconds
from ingot.planner.virtual import through
from ingot.runtime.steps_in_flight import chunk_tokens

MEMORY_USED = 0.9
CHUNK = 2048  # tokens of a step
MOST_BATCH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Goals:
    """input_len, output_len: tokens of a request; count: devices; rate, ttft, tpot: see `PlanOptions`."""

    input_len: int
    output_len: int
    count: int = 1
    rate: float | None = None
    ttft: float | None = None
    tpot: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Percentiles of requests in milliseconds, of the replicas that were simulated; tokens per second of all replicas.

    seconds  of virtual time; steps: of all simulated replicas
    """

    requests: int
    replicas: int
    seconds: float
    steps: int
    ttft_ms_p50: float
    ttft_ms_p90: float
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    output_tokens_per_second: float
    preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RatePoint:
    """What an arrangement gives at `rate` requests per second on all of its devices. cost: as of an arrangement."""

    rate: float
    simulation: Simulation
    cost: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """One way to use the devices, at the batch that gives most tokens within the goals.

    replicas    that generate tokens, each of tp x pp devices; prefill_replicas: that only compute prompts for them; 0:
                every replica computes its own
    batch       requests that run at once on a replica; most_batch: for which there is memory
    bound       what takes most of a step: memory, compute, links or host; or prompts, of servers that compute them
    cost        of a million generated tokens, in the currency of the device's price; None without a price
    meets       the goals, by the formula
    curve       what it gives at several rates, if that was asked for
    """

    device: str
    precision: str
    tp: int
    pp: int
    replicas: int
    prefill_replicas: int
    batch: int
    most_batch: int
    ttft_ms: float
    tpot_ms: float
    output_tokens_per_second: float
    cost: float | None
    bound: str
    meets: bool
    simulation: Simulation | None = None
    curve: tuple[RatePoint, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """plan: of the rank that draws; stages: what a step of one rank of each pipeline stage costs, in their order."""

    device: Device
    precision: str
    tp: int
    pp: int
    plan: Plan
    stages: tuple[StepCost, ...]

    def step(self, rows: int, past: int, prompt: int, begin: int = 0) -> list[StepSeconds]:
        """In each stage: decode rows after `past` tokens, and `prompt` tokens of prompts after `begin` others."""
        before = np.array([past] * rows + [begin] * (prompt > 0), np.int64)
        new = np.array([1] * rows + [prompt] * (prompt > 0), np.int64)
        return [step_seconds(cost, self.device, self.tp, before, new, len(new)) for cost in self.stages]

    def prompt_seconds(self, tokens: int) -> float:
        """One prompt alone. Its chunks follow each other through the stages."""
        begin, end, free = 0, 0.0, [0.0] * self.pp
        while begin < tokens:
            left = tokens - begin
            count = min(left, CHUNK, chunk_tokens(left, self.pp) if self.pp > 1 else left)
            end = through([stage.total for stage in self.step(0, 0, count, begin)], 0.0, free)
            begin += count
        return end

    def handed_seconds(self, tokens: int) -> float:
        """Keys and values of a prompt, from one server to another."""
        nbytes = sum(cost.sequence_bytes(tokens) for cost in self.stages)
        return self.device.link_seconds + nbytes / self.device.link_bandwidth

    def most_batch(self, tokens: int) -> int:
        """How many sequences of this many tokens every rank has memory for."""
        free = (
            (MEMORY_USED * self.device.memory - cost.resident) / max(1.0, cost.sequence_bytes(tokens))
            for cost in self.stages
        )
        return min(MOST_BATCH, int(min(free)))

    def clock(self, cached: int = 0) -> Clock:
        """cached: tokens that every sequence has in the cache before its first step."""
        return stages_clock(self.stages, self.device, self.tp, cached)


def arrangements(goals: Goals, candidate: Candidate, *, can_be_apart: bool) -> Iterator[Arrangement]:
    """At every batch size, if at least one sequence fits. can_be_apart: whether servers of this engine can hand over
    keys and values."""
    most = candidate.most_batch(goals.input_len + goals.output_len)
    for size in sorted({min(most, 1 << n) for n in range(MOST_BATCH.bit_length())}) if most > 0 else ():
        yield _together(goals, candidate, size, most)
        if can_be_apart and goals.count > 1:
            yield from _apart(goals, candidate, size, most)


def _together(goals: Goals, candidate: Candidate, batch: int, most: int) -> Arrangement:
    """`batch` requests at different places of their answers, and prompts that come in between. They are in as many
    steps as there are stages: a request's next token comes when its step has gone through all, and the slowest stage
    has done those of all others."""
    given, new, taking_turns = goals.input_len, goals.output_len, min(candidate.pp, batch)
    rows = -(-batch // taking_turns)
    prompts = round(rows * given / new)  # tokens of prompts beside each decode step, in the long run
    stages = candidate.step(rows, given + new // 2, prompts)
    seconds = [stage.total for stage in stages]
    between = max(sum(seconds), taking_turns * max(seconds))
    wait = max(seconds) / 2 if batch > 1 else 0.0
    return _arrangement(
        goals,
        candidate,
        batch=(batch, most),
        replicas=(goals.count // (candidate.tp * candidate.pp), 0),
        ttft=candidate.prompt_seconds(given) + wait,
        tpot=between,
        speed=goals.count // (candidate.tp * candidate.pp) * batch / between,
        bound=PARTS[int(np.argmax(np.sum([stage.parts for stage in stages], axis=0)))],
    )


def _apart(goals: Goals, candidate: Candidate, batch: int, most: int) -> Iterator[Arrangement]:
    """With as many servers for prompts as keep the others busy, or one more or less."""
    given, new = goals.input_len, goals.output_len
    (step,), prompt = candidate.step(batch, given + new // 2, 0), candidate.prompt_seconds(given)
    decoded, computed = batch / (step.total * new), 1 / prompt  # requests per second of one server
    ideal = goals.count * decoded / (decoded + computed)
    for servers in sorted({min(max(round_(ideal), 1), goals.count - 1) for round_ in (int, lambda x: int(x) + 1)}):
        rates = servers * computed, (goals.count - servers) * decoded
        wait = prompt / 2 if batch > 1 else 0.0
        yield _arrangement(
            goals,
            candidate,
            batch=(batch, most),
            replicas=(goals.count - servers, servers),
            ttft=prompt + candidate.handed_seconds(given) + step.total + wait,
            tpot=step.total,
            speed=min(rates) * new,
            bound="prompts" if rates[0] < rates[1] else step.bound,
        )


def _arrangement(
    goals: Goals,
    candidate: Candidate,
    *,
    batch: tuple[int, int],
    replicas: tuple[int, int],
    ttft: float,
    tpot: float,
    speed: float,
    bound: str,
) -> Arrangement:
    """batch: and the largest; replicas: that generate, and that compute prompts alone; seconds, tokens per second."""
    good = (goals.ttft is None or ttft <= goals.ttft) and (goals.tpot is None or tpot <= goals.tpot)
    enough = goals.rate is None or speed >= goals.rate * goals.output_len
    hourly = candidate.device.price * sum(replicas) * candidate.tp * candidate.pp
    return Arrangement(
        device=candidate.device.name,
        precision=candidate.precision,
        tp=candidate.tp,
        pp=candidate.pp,
        replicas=replicas[0],
        prefill_replicas=replicas[1],
        batch=batch[0],
        most_batch=batch[1],
        ttft_ms=1e3 * ttft,
        tpot_ms=1e3 * tpot,
        output_tokens_per_second=speed,
        cost=1e6 * hourly / 3600 / speed if candidate.device.price else None,
        bound=bound,
        meets=good and enough,
    )
