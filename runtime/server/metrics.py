"""What Prometheus reads at /metrics. Histograms fill as tokens and steps go by; the executor's counts are those of
`health.Pulse`, which a scrape has read once more: it waits for no step."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ingot.runtime.executor import Stats, StepReport

_GAUGES = {
    "requests_running": "Sequences that take part in steps.",
    "requests_waiting": "Sequences in the queue.",
    "blocks_total": "KV blocks.",
    "blocks_used": "KV blocks that sequences hold.",
    "blocks_cached": "KV blocks kept for their contents.",
}
_COUNTERS = {
    "prefix_hit_tokens": "Prompt tokens that the prefix cache gave. Of ingot_prompt_tokens: the hit ratio.",
    "preempted_for_others": "Preemptions because a sequence before it needed a block.",
    "preempted_for_itself": "Preemptions because it needed a block and nobody came after it.",
    "preempted_tokens": "Tokens computed again because of preemptions: their cost.",
}
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_KEPT_STEPS = 100_000  # between two looks

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._seconds("ingot_time_to_first_token_seconds", "Arrival to the first token of a sequence.")
        self._itl = self._seconds("ingot_inter_token_latency_seconds", "Between neighbouring tokens of a sequence.")
        self._tpot = self._seconds(
            "ingot_time_per_output_token_seconds", "(end - first token) / (tokens - 1) of a sequence."
        )
        self._whole = self._seconds("ingot_request_seconds", "Arrival to the end of an answer of the engine.")
        self._prompt_tokens = self._counter("ingot_prompt_tokens", "Prompt tokens of sequences that began.")
        self._tokens = self._counter("ingot_generated_tokens", "Tokens generated.")
        self._queue = self._seconds("ingot_queue_seconds", "Arrival of a request to the first step of a sequence.")
        self._step_tokens = Histogram(
            "ingot_step_tokens",
            "Tokens of a step by kind, where there are any.",
            ["kind"],
            buckets=_TOKENS,
            registry=self.registry,
        )
        self._step_seconds = Histogram(
            "ingot_step_seconds", "Time of a step by phase.", ["phase"], buckets=_SECONDS, registry=self.registry
        )
        self._steps: deque[StepReport] = deque(maxlen=_KEPT_STEPS)
        self._requests = self._counter(
            "ingot_requests",
            "Answers and refusals by route and status; 499: the client left before.",
            "route",
            "status",
        )

    def watch(self, read: Callable[[], Stats]) -> None:
        """Tell what `read` says whenever somebody asks."""
        self.registry.register(_Executor(read))

    def step(self, report: StepReport) -> None:
        """A step ended. On the step thread: noted only."""
        self._steps.append(report)

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

    def answered(self, route: str, status: int) -> None:
        """An answer, or refusal, is out; 499: nobody was there any more."""
        self._requests.labels(route, str(status)).inc()

    def generation_ended(self, seconds: float) -> None:
        """A request to the engine ended, one way or the other."""
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def count_steps(self) -> None:
        """Put the steps noted so far into the histograms; off the step thread and off the event loop."""
        with contextlib.suppress(IndexError):  # somebody else may have taken the last one
            while True:
                self._count(self._steps.popleft())

    def _count(self, step: StepReport) -> None:
        for kind, tokens in (("prefill", step.prefill_tokens), ("decode", step.decode_rows)):
            if tokens:
                self._step_tokens.labels(kind).observe(tokens)
        for phase in ("schedule", "session", "finish"):
            self._step_seconds.labels(phase).observe(getattr(step, f"{phase}_seconds"))

    def _seconds(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, buckets=_SECONDS, registry=self.registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)


class _Executor(Collector):
    """The executor's own counts."""

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        stats: dict[str, int] = {**self._read()}  # type: ignore[dict-item]
        for key, words in _GAUGES.items():
            yield GaugeMetricFamily(f"ingot_{key}", words, value=stats[key])
        free = stats["blocks_total"] - stats["blocks_used"] - stats["blocks_cached"]
        yield GaugeMetricFamily("ingot_blocks_free", "KV blocks that hold nothing.", value=free)
        for key, words in _COUNTERS.items():
            yield CounterMetricFamily(f"ingot_{key}", words, value=stats[key])
