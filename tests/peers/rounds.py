"""Every variant in turn, several times over: what else the machine does hits all alike."""

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence

from ingot.plan import Plan
from tests.peers.adapters.protocol import Job
from tests.peers.clients import FailedError, ask
from tests.peers.limits import Limits, better, limit, take_limits
from tests.peers.peers import Variant
from tests.peers.regimes import Regime
from tests.peers.steps import Say

_TIMEOUT = 3600  # seconds of one variant in one round


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One variant in one round. speeds, limits: tokens per second by regime; machine: measured before and after."""

    speeds: Mapping[str, float]
    limits: Mapping[str, float]
    machine: Limits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of the mixed load. shares: of good requests, by limit of TPOT; ttft, tpot: seconds, median and 90th
    percentile of those that ended; complete: False where too many had missed a limit, and it was given up; error: the
    first one."""

    name: str
    requests: int
    ended: int
    complete: bool
    seconds: float
    shares: Sequence[float]
    ttft: Sequence[float]
    tpot: Sequence[float]
    error: str | None


@dataclasses.dataclass(kw_only=True, slots=True)
class Mixed:
    """The mixed load on one variant, in requests per second. at_once: when all come together, at the rate they end;
    goodputs: by limit of TPOT, 0 where no rate is good; reason: why they are not known."""

    at_once: float | None = None
    goodputs: Sequence[float] = ()
    trials: list[Trial] = dataclasses.field(default_factory=list)
    reason: str | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Outcome:
    """All turns of one variant, and its mixed load; reason: why there are none, or no more."""

    engine: str
    precision: str
    weights: str
    version: str = ""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    mixed: Mixed | None = None
    reason: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """A variant that is ready to run."""

    outcome: Outcome
    variant: Variant
    job: Job
    caps: Mapping[str, str]
    plan: Plan  # of ingot's engine of the same class, for the limits


def run_rounds(entrants: Sequence[Entrant], regimes: Sequence[Regime], rounds: int, say: Say) -> None:
    """Fills the outcomes; without regimes there are versions and limits."""
    for index in range(rounds):
        for entrant in entrants:
            if entrant.outcome.reason is None:
                say(f"round {index + 1} of {rounds}: {entrant.variant.name}")
                _take_turn(entrant, regimes, say)


def _take_turn(entrant: Entrant, regimes: Sequence[Regime], say: Say) -> None:
    outcome, before = entrant.outcome, take_limits(entrant.plan, entrant.job.threads)
    try:
        answer = json.loads(ask(entrant.variant.peer, "measure", entrant.job, entrant.caps, timeout=_TIMEOUT))
        speeds = {regime.name: float(answer["tokens_per_second"][regime.name]) for regime in regimes}
        outcome.version = str(answer["version"])
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        outcome.reason = f"{type(error).__name__}: {error}" if not isinstance(error, FailedError) else str(error)
        say(f"{entrant.variant.name}: {outcome.reason}")
        return
    machine = better(before, take_limits(entrant.plan, entrant.job.threads))
    limits = {regime.name: limit(entrant.plan, regime, machine) for regime in regimes}
    outcome.turns.append(Turn(speeds=speeds, limits=limits, machine=machine))
    if speeds:
        say("  " + ", ".join(f"{name} {speed:.1f} ({speed / limits[name]:.0%})" for name, speed in speeds.items()))
