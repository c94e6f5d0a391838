"""Every variant in turn, several times over: what else the machine does hits all alike."""

import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from compare_peers.adapters.protocol import Job
from compare_peers.limits import Limits, better, limit, take_limits
from compare_peers.peers import Variant
from compare_peers.regimes import Regime
from compare_peers.steps import Say, adapter_command, adapter_environment, last_words
from ingot.plan import Plan

_TIMEOUT = 1800  # seconds of one variant in one round


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One variant in one round. speeds, limits: tokens per second by regime; machine: measured before and after."""

    speeds: Mapping[str, float]
    limits: Mapping[str, float]
    machine: Limits


@dataclasses.dataclass(kw_only=True, slots=True)
class Outcome:
    """All turns of one variant; reason: why there are none, or no more."""

    engine: str
    precision: str
    weights: str
    version: str = ""
    turns: list[Turn] = dataclasses.field(default_factory=list)
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
    """Fills the outcomes."""
    for index in range(rounds):
        for entrant in entrants:
            if entrant.outcome.reason is None:
                say(f"round {index + 1} of {rounds}: {entrant.variant.name}")
                _take_turn(entrant, regimes, say)


def _take_turn(entrant: Entrant, regimes: Sequence[Regime], say: Say) -> None:
    outcome, before = entrant.outcome, take_limits(entrant.plan, entrant.job.threads)
    try:
        answer = _ask(entrant)
        speeds = {regime.name: float(answer["tokens_per_second"][regime.name]) for regime in regimes}
        outcome.version = str(answer["version"])
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        outcome.reason = f"{type(error).__name__}: {error}" if not isinstance(error, _FailedError) else str(error)
        say(f"{entrant.variant.name}: {outcome.reason}")
        return
    machine = better(before, take_limits(entrant.plan, entrant.job.threads))
    limits = {regime.name: limit(entrant.plan, regime, machine) for regime in regimes}
    outcome.turns.append(Turn(speeds=speeds, limits=limits, machine=machine))
    say("  " + ", ".join(f"{name} {speed:.1f} ({speed / limits[name]:.0%})" for name, speed in speeds.items()))


class _FailedError(ValueError):
    """The adapter ended badly; its last words."""


def _ask(entrant: Entrant) -> Any:
    peer, job = entrant.variant.peer, entrant.job
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        done = subprocess.run(
            adapter_command(peer, "measure", job), env=adapter_environment(peer, job.threads, entrant.caps),
            cwd=job.work, stdout=subprocess.PIPE, stderr=log, text=True, timeout=_TIMEOUT,
        )  # fmt: skip
        if done.returncode != 0:
            log.seek(0)
            raise _FailedError(f"measuring failed: {last_words(log.read())}")
    return json.loads(done.stdout)
