"""What Prometheus reads at /metrics. Histograms fill as tokens and steps go by; the executor's counts are those of its
last beat: a scrape waits for no step."""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ingot.runtime.reports import GroupBlocks, Stats, StepReport

_GAUGES = {
    "requests_running": "Sequences that the steps compute now.",
    "requests_waiting": "Sequences that wait in the queue.",
    "blocks_total": "All blocks of the KV cache.",
    "blocks_used": "Blocks of the KV cache that sequences use.",
    "blocks_cached": "Blocks of the KV cache that no sequence uses, kept for the prefix cache.",
}
_COUNTERS = {
    "prefix_hit_tokens": "Prompt tokens that were found in the prefix cache. The hit ratio is this number divided by "
    "ingot_prompt_tokens_total.",
    "preempted_for_others": "Preemptions of a request because a request before it in order needed a block.",
    "preempted_for_itself": "Preemptions of a request that needed a block itself, because no request after it in order "
    "was running.",
    "preempted_tokens": "Tokens that were computed again because of preemptions.",
}
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._seconds(
            "ingot_time_to_first_token_seconds",
            "Seconds from the arrival of a request to the first token of a sequence (TTFT).",
        )
        self._itl = self._seconds(
            "ingot_inter_token_latency_seconds", "Seconds between neighbouring tokens of a sequence (ITL)."
        )
        self._tpot = self._seconds(
            "ingot_time_per_output_token_seconds",
            "Seconds from the first to the last token of a sequence, divided by its tokens - 1 (TPOT).",
        )
        self._whole = self._seconds(
            "ingot_request_seconds", "Seconds from the arrival of a request to the end of its answer."
        )
        self._prompt_tokens = self._counter("ingot_prompt_tokens", "Prompt tokens of all sequences that have started.")
        self._tokens = self._counter("ingot_generated_tokens", "Tokens that were generated.")
        self._queue = self._seconds(
            "ingot_queue_seconds", "Seconds from the arrival of a request to the first step of a sequence."
        )
        self._step_tokens = _StepHistogram(
            "ingot_step_tokens", "Tokens of a step: of prompts (prefill) or of answers (decode).", "kind", _TOKENS
        )
        self._step_seconds = _StepHistogram(
            "ingot_step_seconds",
            "Seconds of a step by phase: schedule, session (kernels) and finish.",
            "phase",
            SECONDS,
        )
        self.registry.register(self._step_tokens)
        self.registry.register(self._step_seconds)
        self._idle_stages = self._counter(
            "ingot_idle_stages",
            "Pipeline stages that had no step, added up over all steps. Divided by the number of steps and by the "
            "number of stages, this is the share of the bubbles.",
        )
        self._drafts = self._counter(
            "ingot_drafted_tokens",
            "Tokens that were drafted for answers (--speculative_config). outcome is right (a draw gave the draft) or "
            "wrong.",
            "outcome",
        )
        self._requests = self._counter(
            "ingot_requests",
            "Answers and refusals by route and status. Status 499: the client hung up before the answer.",
            "route",
            "status",
        )

        self._fetches = self._counter(
            "ingot_prompts_fetched",
            "Prompts of a decode server. outcome is fetched (the blocks came from a prefill server), short or cached "
            "(fewer than --prefill_min_tokens tokens were missing), computed here (no blocks came) or aborted (the "
            "client left).",
            "outcome",
        )
        self._moved = self._counter(
            "ingot_kv_moved_bytes", "Bytes of KV blocks, in from prefill servers or out to decode servers.", "direction"
        )

    def watch(self, read: Callable[[], Stats]) -> None:
        """Tell what `read` says whenever somebody asks."""
        self.registry.register(_Executor(read))

    def step(self, report: StepReport) -> None:
        """Steps ended. On the engine thread."""
        for kind, tokens in (("prefill", report.prefill_tokens), ("decode", report.decode_rows)):
            if tokens:
                self._step_tokens.observe(kind, tokens, report.steps)
        self._step_seconds.observe("schedule", report.schedule_seconds, report.steps)
        self._step_seconds.observe("session", report.session_seconds, report.steps)
        self._step_seconds.observe("finish", report.finish_seconds, report.steps)
        self._idle_stages.inc(report.idle_stages * report.steps)
        if report.drafted:
            self._drafts.labels("right").inc(report.right_drafts)
            self._drafts.labels("wrong").inc(report.drafted - report.right_drafts)

    def first_step(self, seconds: float, prompt_tokens: int) -> None:
        """A sequence waited so long, then its prompt was computed, or found in the cache."""
        self._queue.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """A sequence had its first token."""
        self._ttft.observe(seconds)
        self._tokens.inc()

    def more_tokens(self, seconds: float, count: int) -> None:
        """`count` further tokens, `seconds` after the one before them; together they share the time."""
        for _ in range(count):
            self._itl.observe(seconds / count)
        self._tokens.inc(count)

    def sequence_ended(self, tpot: float) -> None:
        """A sequence of at least two tokens ended."""
        self._tpot.observe(tpot)

    def prompt_fetched(self, outcome: str) -> None:
        """A decode server has asked for the blocks of a prompt, or not."""
        self._fetches.labels(outcome).inc()

    def blocks_moved(self, direction: str, nbytes: int) -> None:
        """KV blocks came in, or were offered to another server."""
        self._moved.labels(direction).inc(nbytes)

    def answered(self, route: str, status: int) -> None:
        """An answer, or refusal, is out; 499: nobody was there any more."""
        self._requests.labels(route, str(status)).inc()

    def generation_ended(self, seconds: float) -> None:
        """A request to the engine ended, one way or the other."""
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _seconds(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, buckets=SECONDS, registry=self.registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)


class _StepHistogram(Collector):
    """Values of steps, of which many are the same: counted at once, where prometheus_client's would count one by one.
    One thread observes.
    """

    def __init__(self, name: str, words: str, label: str, buckets: Sequence[float]) -> None:
        self._name, self._words, self._label = name, words, label
        self._buckets = (*buckets, math.inf)
        self._series: dict[str, tuple[list[int], list[float]]] = {}  # label → count of each bucket, sum

    def observe(self, label: str, value: float, times: int) -> None:
        """The same value so many times."""
        counts, total = self._series.setdefault(label, ([0] * len(self._buckets), [0.0]))
        counts[bisect.bisect_left(self._buckets, value)] += times
        total[0] += value * times

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        family = HistogramMetricFamily(self._name, self._words, labels=[self._label])
        for label, (counts, total) in tuple(self._series.items()):
            ends = map(floatToGoString, self._buckets)
            buckets = list(zip(ends, map(float, itertools.accumulate(counts)), strict=True))
            family.add_metric([label], buckets, total[0])
        yield family


class _Executor(Collector):
    """The executor's own counts."""

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        read = self._read()
        stats: dict[str, int] = {**read}  # type: ignore[dict-item]
        for key, words in _GAUGES.items():
            yield GaugeMetricFamily(f"ingot_{key}", words, value=stats[key])
        free = stats["blocks_total"] - stats["blocks_used"] - stats["blocks_cached"]
        yield GaugeMetricFamily("ingot_blocks_free", "Blocks of the KV cache that are empty.", value=free)
        if len(read["blocks_by_group"]) > 1:
            yield _by_group(read["blocks_by_group"])
        for key, words in _COUNTERS.items():
            yield CounterMetricFamily(f"ingot_{key}", words, value=stats[key])


def _by_group(groups: Sequence[GroupBlocks]) -> Metric:
    """Blocks by group, for an engine with several cache groups."""
    family = GaugeMetricFamily(
        "ingot_group_blocks",
        "Blocks of a cache group by state: used, cached or free. Only engines with several groups have this metric. "
        "`window`: how many tokens of a sequence the group keeps; 0: all tokens.",
        labels=["group", "window", "state"],
    )
    for number, each in enumerate(groups):
        counts = {"used": each["used"], "cached": each["cached"], "free": each["total"] - each["used"] - each["cached"]}
        for state, count in counts.items():
            family.add_metric([str(number), str(each["window"]), state], count)
    return family
