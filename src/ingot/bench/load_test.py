"""`ingot bench serve --url`: load on any OpenAI-compatible server, and what its clients see of it.

closed loop   --concurrency N: N clients, each sends its next request when it has the last answer
open loop     --rate R: requests arrive whatever the server does, Poisson or as in a trace; their times count from
              the planned arrival, so that a server that falls behind cannot hide it
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.bench.http_client import Answer, Client
from ingot.bench.serve import GOOD_SHARE
from ingot.bench.trace import TraceRow, arrivals_at, read_trace, scale_lengths
from ingot.errors import IngotError, UsageError

_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "hand",
)
_CALIBRATION = 200  # words, or as many as the server takes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OnlineOptions:
    """rates: requests per second, one run each; concurrencies: the same for closed loops.

    trace         lengths, and for --rate without poisson the pattern of arrivals; None: input_len and output_len
    model         None: the first that the server lists
    ttft_ms, tpot_ms  limits of a good request
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    num_requests: int = 100
    trace: Path | None = None
    length_scale: float = 1.0
    input_len: int = 128
    output_len: int = 64
    max_input: int | None = None
    max_output: int | None = None
    poisson: bool = False
    ignore_eos: bool = False
    temperature: float = 0.0
    ttft_ms: float = 1000.0
    tpot_ms: float = 100.0
    timeout: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates and not self.concurrencies:
            raise UsageError(
                "neither --rate nor --concurrency is given",
                hint="add --concurrency 16 or --rate 2.5; both can be given several times",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """One run. ttft, e2e: from the planned arrival; itl: gaps between pieces of text; tpot: (end - TTFT) / (n - 1).

    rate          requests per second that were asked for; None of a closed loop
    good_share    requests within both limits, of all
    good_requests_per_second  in an open loop of few requests this may be more than the rate: arrivals are random
    errors        words → how often
    samples       milliseconds behind the percentiles, for plots
    """

    load: str
    rate: float | None
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_mean: float | None
    output_tokens_mean: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None
    good_share: float
    good_requests_per_second: float
    samples: dict[str, list[float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OnlineReport:
    """All runs against one server. goodput: the highest rate of an open loop whose requests were good, as in
    `ingot bench serve --offline`; 0 where none was, None without open loops."""

    url: str
    model: str
    trace: str | None
    ttft_ms: float
    tpot_ms: float
    runs: tuple[LoadReport, ...]
    goodput: float | None


Progress = Callable[[str, int, int], None]


def bench_online(options: OnlineOptions, progress: Progress) -> OnlineReport:
    """Every run in turn. Raises IngotError if the server cannot be used at all."""
    return asyncio.run(_run(options, progress))


async def _run(options: OnlineOptions, progress: Progress) -> OnlineReport:
    async with Client(options.url, options.api_key) as client:
        return await _Bench(options, progress, client).run()


class _Bench:
    def __init__(self, options: OnlineOptions, progress: Progress, client: Client) -> None:
        self._options, self._progress, self._client = options, progress, client
        self._rows = _rows(options)
        self._random = random.Random(options.seed)
        self._words_per_token = 1.0
        self._model = options.model or ""

    async def run(self) -> OnlineReport:
        options = self._options
        await self._meet()
        runs = [await self._closed(count) for count in options.concurrencies]
        runs += [await self._open(rate) for rate in options.rates]
        return OnlineReport(
            url=options.url,
            model=self._model,
            trace=None if options.trace is None else str(options.trace),
            ttft_ms=options.ttft_ms,
            tpot_ms=options.tpot_ms,
            runs=tuple(runs),
            goodput=_goodput(runs),
        )

    async def _meet(self) -> None:
        """Find the model, and how many words make a token."""
        try:
            if not self._model:
                self._model = str((await self._client.get_json("/models"))["data"][0]["id"])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise IngotError(
                "the server lists no model",
                where=self._options.url,
                got=f"{type(error).__name__}: {error}",
                hint="check that the server runs at this address; give --api_key KEY if it needs one",
            ) from error
        self._progress("asking the server how many tokens a word has", 0, 0)
        words = _CALIBRATION
        answer = await self._ask(self._prompt(words), 2)
        while answer.error is not None and answer.error.startswith("status 400") and words > 1:  # too long, perhaps
            words //= 2
            answer = await self._ask(self._prompt(words), 2)
        if answer.error is not None:
            raise IngotError(
                "the server does not complete a prompt",
                where=self._options.url,
                got=answer.error,
                hint="look into the log of the server",
            )
        if answer.prompt_tokens:
            self._words_per_token = words / answer.prompt_tokens

    async def _closed(self, concurrency: int) -> LoadReport:
        rows = iter(list(enumerate(self._rows)))
        answers: list[Answer] = []
        name = f"{concurrency} at once"

        async def client() -> None:
            for _, row in rows:
                answers.append(await self._ask_row(row))
                self._progress(name, len(answers), len(self._rows))

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(min(concurrency, len(self._rows)))))
        return self._report(name, None, answers, [answer.start for answer in answers], time.perf_counter() - begin)

    async def _open(self, rate: float) -> LoadReport:
        options = self._options
        poisson = options.poisson or options.trace is None
        times = arrivals_at(self._rows, rate, poisson=poisson, seed=options.seed)
        done = 0
        name = f"{rate:g} requests/s"

        async def client(row: TraceRow, planned: float) -> Answer:
            nonlocal done
            await asyncio.sleep(max(planned - time.perf_counter(), 0))
            answer = await self._ask_row(row)
            done += 1
            self._progress(name, done, len(self._rows))
            return answer

        begin = time.perf_counter() + 0.05
        planned = [begin + at for at in times]
        answers = await asyncio.gather(*(client(row, at) for row, at in zip(self._rows, planned, strict=True)))
        return self._report(name, rate, answers, planned, time.perf_counter() - begin)

    def _prompt(self, tokens: int) -> str:
        """Random words, about this many tokens: no two prompts have a common head."""
        count = max(1, round(tokens * self._words_per_token))
        return " ".join(self._random.choices(_WORDS, k=count))

    async def _ask_row(self, row: TraceRow) -> Answer:
        return await self._ask(self._prompt(row.input_len), row.output_len)

    async def _ask(self, prompt: str, tokens: int) -> Answer:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": tokens,
            "temperature": options.temperature,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = "/chat/completions" if options.chat else "/completions"
        return await self._client.stream(path, body, options.timeout)

    def _report(
        self, load: str, rate: float | None, answers: Sequence[Answer], planned: Sequence[float], seconds: float
    ) -> LoadReport:
        good, samples = 0, _samples(answers, planned)
        for answer, begin in zip(answers, planned, strict=True):
            if answer.error is None:
                ttft, tpot = 1e3 * (answer.pieces[0] - begin) if answer.pieces else 0.0, _tpot(answer)
                good += ttft <= self._options.ttft_ms and (tpot is None or tpot <= self._options.tpot_ms)
        ended = [answer for answer in answers if answer.error is None]
        errors: dict[str, int] = {}
        for answer in answers:
            if answer.error is not None:
                errors[answer.error] = errors.get(answer.error, 0) + 1
        tokens = sum(answer.tokens for answer in ended)
        prompts = [answer.prompt_tokens for answer in ended if answer.prompt_tokens is not None]
        return LoadReport(
            load=load,
            rate=rate,
            requests=len(answers),
            failed=len(answers) - len(ended),
            errors=errors,
            seconds=seconds,
            requests_per_second=len(ended) / seconds,
            output_tokens_per_second=tokens / seconds,
            prompt_tokens_mean=float(np.mean(prompts)) if prompts else None,
            output_tokens_mean=tokens / max(len(ended), 1),
            ttft=_percentiles(samples["ttft"]),
            tpot=_percentiles(samples["tpot"]),
            itl=_percentiles(samples["itl"]),
            e2e=_percentiles(samples["e2e"]),
            good_share=good / len(answers),
            good_requests_per_second=good / seconds,
            samples=samples,
        )


def _goodput(runs: Sequence[LoadReport]) -> float | None:
    rates = {run.rate: run.good_share >= GOOD_SHARE for run in runs if run.rate is not None}
    return max((rate for rate, good in rates.items() if good), default=0.0) if rates else None


def _samples(answers: Sequence[Answer], planned: Sequence[float]) -> dict[str, list[float]]:
    """Milliseconds, of the answers that came to their end."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    for answer, begin in zip(answers, planned, strict=True):
        if answer.error is not None:
            continue
        found["e2e"].append(1e3 * (answer.end - begin))
        if answer.pieces:
            found["ttft"].append(1e3 * (answer.pieces[0] - begin))
            found["itl"] += (1e3 * np.diff(answer.pieces)).tolist()
        if (tpot := _tpot(answer)) is not None:
            found["tpot"].append(tpot)
    return found


def _tpot(answer: Answer) -> float | None:
    """Milliseconds per token after the first."""
    if answer.tokens < 2 or len(answer.pieces) < 2:
        return None
    return 1e3 * (answer.pieces[-1] - answer.pieces[0]) / (answer.tokens - 1)


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Percentiles(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def _rows(options: OnlineOptions) -> list[TraceRow]:
    if options.trace is None:
        row = TraceRow(arrival=0.0, input_len=options.input_len, output_len=options.output_len)
        return [row] * options.num_requests
    rows = read_trace(options.trace, options.num_requests)
    return scale_lengths(rows, options.length_scale, options.max_input or 10**9, options.max_output or 10**9)
