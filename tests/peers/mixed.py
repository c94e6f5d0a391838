"""A recorded trace at many rates on every engine that batches continuously: goodputs, and what all at once take.

Engines of one class take turns, run by run: what else the machine does hits all alike.
"""

import dataclasses
import json
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ingot.bench.trace import TraceRow, arrivals_at, read_trace, scale_lengths
from tests.peers.adapters.protocol import random_prompts
from tests.peers.clients import FailedError, run_load
from tests.peers.goodput import GOOD_SHARE, RESOLUTION, Attempt, Search, allowed_misses
from tests.peers.load import MAX_INPUT, MAX_OUTPUT, Load, Run
from tests.peers.rounds import Entrant, Mixed, Trial
from tests.peers.steps import Say

_ALONE = 5  # requests, each after the other


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixedOptions:
    """ttft: seconds; tpots: seconds, loosest first, a goodput for each; length_scale: of the trace's lengths, which are
    then clipped to load.MAX_INPUT and load.MAX_OUTPUT."""

    trace: Path
    requests: int = 200
    ttft: float = 2.0
    tpots: Sequence[float] = (0.2, 0.05)
    length_scale: float = 0.25

    @property
    def words(self) -> str:
        """What it is, for a heading."""
        return (
            f"first {self.requests} requests of {self.trace.name}, lengths x {self.length_scale:g} clipped to "
            f"{MAX_INPUT}/{MAX_OUTPUT}, arrivals stretched by one factor; goodput: highest rate, within a factor of "
            f"{RESOLUTION}, at which {GOOD_SHARE:.0%} meet TTFT < {self.ttft:g} s and TPOT"
        )

    def rows(self) -> list[TraceRow]:
        """Raises UsageError."""
        return scale_lengths(read_trace(self.trace, self.requests), self.length_scale, MAX_INPUT, MAX_OUTPUT)


Runner = Callable[[Load], Run]


class Bench:
    """The search of one engine: alone, all at once, then rates."""

    def __init__(self, options: MixedOptions, rows: Sequence[TraceRow], run: Runner, mixed: Mixed) -> None:
        """Fills `mixed`."""
        self._options, self._rows, self._run, self.mixed = options, rows, run, mixed
        self._prompts = [random_prompts(random.Random(number), 1, row.input_len)[0] for number, row in enumerate(rows)]
        self._possible: list[bool] = []
        self._search: Search | None = None

    def advance(self) -> Trial | None:
        """One more run; None: there is none to do. Raises FailedError."""
        if not self._possible:
            return self._alone()
        if self._search is None:
            return self._at_once()
        attempt = self._search.attempt()
        if attempt is None:
            return None
        trial = self._at_rate(attempt)
        self._search.note(attempt, trial.shares, complete=trial.complete)
        self.mixed.goodputs = self._search.goodputs
        return trial

    def _alone(self) -> Trial:
        """Requests whose prompts are longer than those of nine in ten: if they miss a limit alone, no rate is good."""
        by_length = sorted(range(len(self._rows)), key=lambda number: self._rows[number].input_len)
        middle = min(round(GOOD_SHARE * len(by_length)), len(by_length) - 1)
        chosen = by_length[max(middle - _ALONE // 2, 0) : middle + _ALONE // 2 + 1]
        trial = self._trial("alone", chosen, None, allowed=None, limit=0)
        self._possible = [share >= 0.5 for share in trial.shares]
        return trial

    def _at_once(self) -> Trial:
        """How fast they are worked off; half of that is where the search begins."""
        everyone = range(len(self._rows))
        trial = self._trial("at once", everyone, [0.0] * len(self._rows), allowed=None, limit=0)
        self.mixed.at_once = trial.ended / trial.seconds
        self._search = Search(
            start=self.mixed.at_once / 2,
            highest=4 * self.mixed.at_once,
            limits=len(self._options.tpots),
            possible=self._possible,
        )
        self.mixed.goodputs = self._search.goodputs
        return trial

    def _at_rate(self, attempt: Attempt) -> Trial:
        arrivals = arrivals_at(self._rows, attempt.rate, poisson=False, seed=0)
        name, allowed = f"{attempt.rate:.3g} requests/s", allowed_misses(len(self._rows))
        return self._trial(name, range(len(self._rows)), arrivals, allowed=allowed, limit=attempt.limit)

    def _trial(
        self, name: str, numbers: Sequence[int], arrivals: Sequence[float] | None, *, allowed: int | None, limit: int
    ) -> Trial:
        options = self._options
        load = Load(
            prompts=[self._prompts[number] for number in numbers],
            outputs=[self._rows[number].output_len for number in numbers],
            arrivals=arrivals,
            ttft=options.ttft,
            tpot=options.tpots[limit],
            allowed=allowed,
        )
        trial = describe(name, self._run(load), len(numbers), options)
        self.mixed.trials.append(trial)
        if not trial.ended and trial.complete:
            raise FailedError(trial.error or "no request came to its end")
        return trial


def describe(name: str, run: Run, requests: int, options: MixedOptions) -> Trial:
    """Shares are of all requests: those that a run which was given up did not end are not good."""
    ended = [fate for fate in run.fates if fate.ended and fate.error is None]
    ttfts = [fate.ttft for fate in ended if fate.ttft is not None]
    tpots = [fate.tpot for fate in ended if fate.tpot is not None]
    return Trial(
        name=name,
        requests=requests,
        ended=len(ended),
        complete=run.complete,
        seconds=run.seconds,
        shares=[sum(fate.good(options.ttft, tpot) for fate in run.fates) / requests for tpot in options.tpots],
        ttft=_median_and_ninth(ttfts),
        tpot=_median_and_ninth(tpots),
        error=next((fate.error for fate in run.fates if fate.error is not None), None),
    )


def run_mixed(entrants: Sequence[Entrant], options: MixedOptions, say: Say) -> None:
    """Fills `mixed` of the outcomes."""
    rows = options.rows()
    for precision in dict.fromkeys(entrant.outcome.precision for entrant in entrants):
        benches: list[tuple[Entrant, Bench]] = []
        for entrant in entrants:
            if entrant.outcome.precision == precision and entrant.outcome.reason is None:
                entrant.outcome.mixed = mixed = Mixed()
                if entrant.variant.peer.serving is None:
                    mixed.reason = "no continuous batching"
                else:
                    benches.append((entrant, Bench(options, rows, _runner(entrant), mixed)))
        try:
            while benches:
                benches = [(entrant, bench) for entrant, bench in benches if _take_turn(entrant, bench, options, say)]
        except KeyboardInterrupt:
            for _, bench in benches:
                bench.mixed.reason = bench.mixed.reason or "interrupted; goodputs are the best rates until then"
            raise


def _runner(entrant: Entrant) -> Runner:
    return lambda load: run_load(entrant.variant.peer, entrant.job, entrant.caps, load)


def _take_turn(entrant: Entrant, bench: Bench, options: MixedOptions, say: Say) -> bool:
    """Whether there may be more to do."""
    name, mixed = entrant.variant.name, bench.mixed
    try:
        trial = bench.advance()
    except (FailedError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        mixed.reason = str(error)
        say(f"mixed load: {name}: {error}")
        return False
    if trial is None:
        found = zip(mixed.goodputs, options.tpots, strict=True)
        words = ", ".join(f"{goodput:.3g} requests/s with TPOT < {1e3 * tpot:g} ms" for goodput, tpot in found)
        say(f"mixed load: {name}: goodput {words}")
        return False
    shares = ", ".join(f"{share:.0%}" for share in trial.shares)
    say(
        f"mixed load: {name}, {trial.name}: {shares} good of {trial.requests}"
        f"{'' if trial.complete else ', given up'}, {trial.seconds:.0f} s"
        f"{f'; {trial.error}' if trial.error else ''}"
    )
    return True


def _median_and_ninth(values: Sequence[float]) -> Sequence[float]:
    """Median and 90th percentile; nothing of nothing."""
    if not values:
        return ()
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(round(0.9 * len(ordered)), len(ordered) - 1)]
