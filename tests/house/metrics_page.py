"""docs/metrics.md from the server's own registry: `python -m tests.house.metrics_page` writes it."""

from ingot.runtime.reports import GroupBlocks, Stats, StepReport
from ingot.runtime.server.metrics import SECONDS, Metrics
from tests.house.project import ROOT

PAGE = ROOT / "docs/metrics.md"
_HEAD = """# Metrics

This page lists the metrics that Prometheus reads from `/metrics`, which needs no API key.
`examples/deploy/alerts.yml` has rules for alerts, `examples/deploy/dashboard.json` a dashboard for Grafana.
`python -m tests.house.metrics_page` writes the page from the server's own list.

| metric | kind | labels | meaning |
|---|---|---|---|
"""
_TAIL = """
A sequence is one answer of a request: a request with `n` = 3 has three sequences. Layers that keep the same tokens
form a [cache group](design.md#cache-groups). The label `window` is the number of tokens that a group keeps of each
sequence; 0 means all tokens.

To choose the number of servers, watch `ingot_requests_waiting`: it rises as soon as requests find no room. A rule to
begin with is one more server when `avg_over_time(ingot_requests_waiting[1m]) > 0`.
`ingot_queue_seconds` says how long requests waited. The load of the CPU says little, because one request keeps all
threads busy.

Prometheus stores a histogram as three series, whose names end with `_bucket`, `_sum` and `_count`. The gauges, the hits
of the prefix cache and the counters of preemptions are updated at the end of each step.

## Queries

This PromQL query gives the TPOT that 99 % of the requests stay below. For TTFT, use
`ingot_time_to_first_token_seconds_bucket`:

```promql
histogram_quantile(0.99, sum by (le) (rate(ingot_time_per_output_token_seconds_bucket[5m])))
```

This query gives the share of the prompt tokens that came from the prefix cache:

```promql
rate(ingot_prefix_hit_tokens_total[5m]) / rate(ingot_prompt_tokens_total[5m])
```

A quantile is exact only at the ends of the histogram's buckets, and interpolated between them. In seconds, the buckets
end at BUCKETS.
"""


def names() -> dict[str, tuple[str, str, str]]:
    """Metric → kind, labels, meaning. A counter has `_total` at its end, as Prometheus sees it."""
    found = {}
    for family in _seen().registry.collect():
        labels = sorted({label for sample in family.samples for label in sample.labels if label != "le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, ", ".join(f"`{label}`" for label in labels), family.documentation)
    return found


def _seen() -> Metrics:
    """Metrics with a sample of every label."""
    metrics = Metrics()
    metrics.answered("/v1/completions", 200)
    metrics.prompt_fetched("fetched")
    metrics.blocks_moved("in", 1)
    metrics.step(StepReport(prefill_tokens=1, decode_rows=1, schedule_seconds=0, session_seconds=0, finish_seconds=0))
    groups = [GroupBlocks(window=window, total=0, used=0, cached=0) for window in (0, 1)]
    stats = {**dict.fromkeys(Stats.__annotations__, 0), "blocks_by_group": groups}
    metrics.watch(lambda: Stats(**stats))  # type: ignore[typeddict-item]
    return metrics


def page() -> str:
    """The whole page."""
    rows = (f"| `{name}` | {kind} | {labels} | {words} |" for name, (kind, labels, words) in sorted(names().items()))
    ends = ", ".join(f"{end:g}" for end in SECONDS)
    return _HEAD + "\n".join(rows) + "\n" + _TAIL.replace("BUCKETS", ends)


if __name__ == "__main__":
    PAGE.write_text(page())
