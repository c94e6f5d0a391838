"""`ingot bench serve --offline`: goodput of a trace, with chunked and mixed steps against neither.

The requests of a trace arrive at a given rate at an executor in this process. Goodput is the highest rate at which
90 % of them meet both limits: TTFT, counted from arrival, and TPOT. The modes take turns, run by run, and the rate at
which all requests at once are worked off is measured before and after: a machine whose speed changes meanwhile shows.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ingot.bench.timing import RequestTimes
from ingot.bench.trace import TraceRow, arrivals_at, read_trace, scale_lengths
from ingot.configs.runtime import RuntimeConfig
from ingot.engine import read_manifest
from ingot.errors import UsageError
from ingot.plan import Limits
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import Request
from ingot.runtime.session import join_ranks, load_engine

GOOD_SHARE = 0.9
_MAX_INPUT, _MAX_OUTPUT = 768, 256  # tokens

MODES = {"chunked_mixed": True, "neither": False}  # name → enable_chunked_prefill


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """ttft_ms, tpot_ms: limits that a good request keeps; TPOT does not bind a request of one token.

    length_scale    lengths of the trace times this, clipped to max_input and max_output
    max_input       None: 768, or less where the engine holds less; max_output: 256, or less
    start_rate      requests per second to begin the search with; None: half of what runs when all come at once
    rate_precision  the search ends when the highest good rate and the lowest bad one are this close, relatively
    poisson         exponential gaps instead of the trace's
    tpot_target     passed to the runner with chunked and mixed steps
    """

    engine_dir: Path
    trace: Path
    num_requests: int = 100
    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0
    length_scale: float = 0.25
    max_input: int | None = None
    max_output: int | None = None
    start_rate: float | None = None
    rate_precision: float = 0.1
    poisson: bool = False
    tpot_target: float | None = None
    seed: int = 0
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    threads: int | None = None
    isa: str | None = None
    target: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RateReport:
    """One run. good_share: of the requests, those within both limits; times in milliseconds, 50th and 90th percentiles.

    complete is False where the run was given up as soon as too many requests had missed a limit.
    """

    rate: float
    good_share: float
    complete: bool
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    tpot_ms_p50: float | None
    tpot_ms_p90: float | None
    mixed_steps: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModeReport:
    """goodput: requests per second, 0 if no rate was good; rates in the order they were tried; saturated: requests per
    second when all come at once, before and after the search."""

    mode: str
    goodput: float
    saturated: tuple[float, float]
    rates: tuple[RateReport, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeReport:
    """ratio: goodput with chunked and mixed steps over goodput with neither; None where that is 0.

    drift: the highest saturated rate of a mode over its lowest, the worse of the modes. Near 1 on a quiet machine; a
    ratio that is not well beyond it says nothing.
    """

    engine: str
    trace: str
    num_requests: int
    max_input: int
    max_output: int
    arrivals: str
    ttft_ms: float
    tpot_ms: float
    input_len_mean: float
    output_len_mean: float
    modes: tuple[ModeReport, ...]
    ratio: float | None
    drift: float


def bench_serve(options: ServeOptions, progress: Callable[[str, int, int], None]) -> ServeReport:
    """Search the goodput of both modes, one run of each in turn."""
    config = RuntimeConfig(
        threads=options.threads,
        isa=options.isa,
        target=options.target,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
    )
    join_ranks(options.engine_dir, config)
    max_input, max_output = _clips(options, read_manifest(options.engine_dir).limits)
    rows = scale_lengths(read_trace(options.trace, options.num_requests), options.length_scale, max_input, max_output)
    with contextlib.ExitStack() as open_runners:
        searches, loaded = [], load_engine(options.engine_dir, config)
        for number, (mode, chunked) in enumerate(MODES.items()):
            tpot_target = options.tpot_target if chunked else None
            own = dataclasses.replace(config, enable_chunked_prefill=chunked, tpot_target=tpot_target)
            if number and loaded.engine.manifest.ranks == 1:  # several ranks follow no second session
                loaded = load_engine(options.engine_dir, config)
            runner = open_runners.enter_context(ModelRunner(loaded, own))
            searches.append(_Search(mode, _Load(runner, rows, options)))
        while not all(search.done for search in searches):
            for search in searches:
                if not search.done:
                    search.advance(progress)
        modes = [search.report() for search in searches]
    on, off = (mode.goodput for mode in modes)
    return ServeReport(
        engine=str(options.engine_dir),
        trace=str(options.trace),
        num_requests=len(rows),
        max_input=max_input,
        max_output=max_output,
        arrivals="poisson" if options.poisson else "trace",
        ttft_ms=options.ttft_ms,
        tpot_ms=options.tpot_ms,
        input_len_mean=float(np.mean([row.input_len for row in rows])),
        output_len_mean=float(np.mean([row.output_len for row in rows])),
        modes=tuple(modes),
        ratio=on / off if off else None,
        drift=max(max(mode.saturated) / min(mode.saturated) for mode in modes),
    )


class _Load:
    """Runs the trace at any rate on one runner. Prompts are random and never come twice, so that no prefix is hit."""

    def __init__(self, runner: ModelRunner, rows: Sequence[TraceRow], options: ServeOptions) -> None:
        self._runner, self._rows, self._options = runner, rows, options
        self._rng = np.random.default_rng(options.seed)

    @property
    def options(self) -> ServeOptions:
        return self._options

    def saturated_rate(self) -> float:
        """Requests per second when all come at once."""
        start = time.perf_counter()
        requests = self._requests()
        self._runner.executor.complete(requests)
        _raise_first_error(requests)
        return len(requests) / (time.perf_counter() - start)

    def run(self, rate: float) -> RateReport:
        """All requests at `rate` per second; given up when more have missed a limit than goodput allows."""
        arrivals = arrivals_at(self._rows, rate, poisson=self._options.poisson, seed=self._options.seed)
        requests, executor = self._requests(), self._runner.executor
        outlet, indices = Outlet(), {request: index for index, request in enumerate(requests)}
        times: list[list[float]] = [[] for _ in requests]
        allowed = math.floor((1 - GOOD_SHARE) * len(requests) + 1e-9)
        logged = len(executor.step_log())
        added = ended = missed = 0
        start = time.perf_counter()
        try:
            while ended < len(requests) and missed <= allowed:
                now = time.perf_counter() - start
                while added < len(requests) and arrivals[added] <= now:
                    executor.add([requests[added]], outlet)
                    added += 1
                news = outlet.get(timeout=max(arrivals[added] - now, 0) if added < len(requests) else None)
                now = time.perf_counter() - start
                for request, count, has_ended in news:
                    own = times[indices[request]]
                    own += [now] * (count - len(own))
                    if has_ended:
                        _raise_first_error([request])
                        ended += 1
                        missed += not self._good(own, arrivals[indices[request]])
        finally:
            executor.abort(requests)
        # Runners of several ranks share a session: what it has begun ends before another one runs.
        steps = executor.while_still(executor.step_log)
        return self._report(rate, times, arrivals, steps[logged:], complete=missed <= allowed)

    def _requests(self) -> list[Request]:
        vocab = self._runner.model_info.vocab_size
        return [
            Request(self._rng.integers(0, vocab, row.input_len, dtype=np.int32), max_new_tokens=row.output_len)
            for row in self._rows
        ]

    def _good(self, tokens: Sequence[float], arrival: float) -> bool:
        seen = RequestTimes(tokens=tuple(tokens))
        on_time = 1e3 * (seen.ttft - arrival) <= self._options.ttft_ms
        return on_time and (seen.tpot is None or 1e3 * seen.tpot <= self._options.tpot_ms)

    def _report(
        self,
        rate: float,
        times: Sequence[Sequence[float]],
        arrivals: Sequence[float],
        steps: Sequence[Sequence[int]],
        *,
        complete: bool,
    ) -> RateReport:
        ended = [index for index, row in enumerate(self._rows) if len(times[index]) == row.output_len]
        ttfts = [1e3 * (times[index][0] - arrivals[index]) for index in ended]
        tpots = [tpot for index in ended if (tpot := RequestTimes(tokens=tuple(times[index])).tpot) is not None]
        return RateReport(
            rate=rate,
            good_share=sum(self._good(times[index], arrivals[index]) for index in ended) / len(self._rows),
            complete=complete,
            ttft_ms_p50=_percentile(ttfts, 50),
            ttft_ms_p90=_percentile(ttfts, 90),
            tpot_ms_p50=_percentile([1e3 * tpot for tpot in tpots], 50),
            tpot_ms_p90=_percentile([1e3 * tpot for tpot in tpots], 90),
            mixed_steps=sum(prefill > 0 and decode > 0 for prefill, decode in steps),
            steps=len(steps),
        )


class _Search:
    """Doubles or halves the rate until one is good and its double is not, then halves the gap between the two."""

    def __init__(self, mode: str, load: _Load) -> None:
        self._mode, self._load = mode, load
        load.saturated_rate()  # warms up
        self._saturated = load.saturated_rate()
        self._rate = load.options.start_rate or self._saturated / 2
        self._lowest, self._highest = (
            self._rate / 64,
            16 * self._saturated,
        )  # beyond: limits missed or met whatever comes
        self._low, self._high = 0.0, math.inf
        self._tried: list[RateReport] = []
        self.done = False

    def advance(self, progress: Callable[[str, int, int], None]) -> None:
        """Try one more rate."""
        expected = 4 + math.ceil(math.log2(1 / self._load.options.rate_precision))
        count = len(self._tried)
        progress(f"{self._mode}, {self._rate:.3g} requests/s", count, max(expected, count + 1))
        self._tried.append(self._load.run(self._rate))
        if self._tried[-1].good_share >= GOOD_SHARE:
            self._low = self._rate
        else:
            self._high = self._rate
        if not self._low:
            self._rate = self._high / 2
            self.done = self._rate < self._lowest
        elif math.isinf(self._high):
            self._rate = self._low * 2
            self.done = self._low > self._highest
        else:
            self._rate = math.sqrt(self._low * self._high)
            self.done = self._high / self._low <= 1 + self._load.options.rate_precision

    def report(self) -> ModeReport:
        """What was found, with a last look at how fast the machine is."""
        after = self._load.saturated_rate()
        return ModeReport(
            mode=self._mode, goodput=self._low, saturated=(self._saturated, after), rates=tuple(self._tried)
        )


def _clips(options: ServeOptions, limits: Limits) -> tuple[int, int]:
    """What the lengths of the trace are clipped to. Only values that were given are refused."""
    max_input = options.max_input or min(_MAX_INPUT, limits.max_input_len, limits.max_seq_len - 1)
    max_output = options.max_output or min(_MAX_OUTPUT, limits.max_seq_len - max_input)
    if max_input > limits.max_input_len or max_output < 1 or max_input + max_output > limits.max_seq_len:
        raise UsageError(
            "--max_input and --max_output together are more than the engine allows",
            expected=f"at most {limits.max_input_len} tokens in, {limits.max_seq_len} in all",
            got=f"{max_input} + {max_output}",
            hint=f"lower them to {limits.max_seq_len} in all; `ingot inspect ENGINE` lists the limits",
        )
    return max_input, max_output


def _raise_first_error(requests: Iterable[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None
