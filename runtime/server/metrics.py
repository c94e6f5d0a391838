"""What Prometheus reads at /metrics. Counters and histograms are filled by the event loop alone, gauges when asked."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

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
        self._whole = self._seconds("ingot_request_seconds", "Arrival to the end of an answer.")
        self._prompt_tokens = self._counter("ingot_prompt_tokens", "Tokens of prompts.")
        self._tokens = self._counter("ingot_generated_tokens", "Tokens generated.")
        self._requests = self._counter("ingot_requests", "Answers by route and status.", "route", "status")

    def add_gauge(self, name: str, words: str, read: Callable[[], float]) -> None:
        """A gauge that is read when somebody asks."""
        Gauge(name, words, registry=self.registry).set_function(read)

    def add_collector(self, collector: Collector) -> None:
        """Metrics that somebody else counts."""
        self.registry.register(collector)

    def first_token(self, seconds: float, count: int) -> None:
        """A sequence had its first `count` tokens."""
        self._ttft.observe(seconds)
        self._tokens.inc(count)

    def more_tokens(self, seconds: float, count: int) -> None:
        """`count` further tokens, `seconds` after the one before them; together they share the time."""
        for _ in range(count):
            self._itl.observe(seconds / count)
        self._tokens.inc(count)

    def sequence_ended(self, tpot: float) -> None:
        """A sequence of at least two tokens ended."""
        self._tpot.observe(tpot)

    def answered(self, route: str, status: int, seconds: float, prompt_tokens: int) -> None:
        """An answer is out."""
        self._requests.labels(route, str(status)).inc()
        self._whole.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _seconds(self, name: str, words: str) -> Histogram:
        return Histogram(name, words, buckets=_SECONDS, registry=self.registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)
