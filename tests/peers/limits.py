"""What the machine allows at most: memory over the bytes that must be read, arithmetic over what must be computed.

The bytes are those of ingot's engine of the same class: its weights once per step, keys and values of every sequence
(of a prompt: written), products and attention.
"""

import dataclasses
from collections.abc import Mapping

from ingot.bench.bytes_read import decode_bytes, kv_bytes_per_token, weight_bytes_per_step
from ingot.plan import Plan
from ingot.plugins.cpu.native import peak_flops, peak_name, read_bandwidth
from ingot.plugins.plan_work import PlanWork
from ingot.step_work import Load
from tests.peers.regimes import Regime

_ARITHMETIC = ("matmul", "screened_matmul", "paged_attention")  # ops whose operations count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bytes per second of a buffer of buffer_bytes; operations per second by kind of arithmetic."""

    bandwidth: float
    buffer_bytes: int
    peaks: Mapping[str, float]


def take_limits(plan: Plan, threads: int) -> Limits:
    """Measure, now."""
    buffer_bytes = weight_bytes_per_step(plan)
    names = sorted({peak_name(step.kernel) for step in plan.steps if step.op in _ARITHMETIC})
    return Limits(
        bandwidth=read_bandwidth(buffer_bytes, threads),
        buffer_bytes=buffer_bytes,
        peaks={name: peak_flops(name, threads) for name in names},
    )


def better(one: Limits, other: Limits) -> Limits:
    """The higher of each: what the machine could do meanwhile, even if others used it for a moment."""
    peaks = {name: max(peak, other.peaks[name]) for name, peak in one.peaks.items()}
    return dataclasses.replace(one, bandwidth=max(one.bandwidth, other.bandwidth), peaks=peaks)


def limit(plan: Plan, regime: Regime, limits: Limits) -> float:
    """Tokens per second that nothing can surpass."""
    if regime.kind == "decode":
        context = regime.prompt + regime.generated // 2
        load = Load(sequences=[(context, 1)] * regime.sequences, logit_rows=regime.sequences, best_only=True)
        nbytes = decode_bytes(plan, batch_size=regime.sequences, context=context, best_rows=regime.sequences)
    else:
        load = Load(sequences=[(0, regime.prompt)], logit_rows=1)
        nbytes = weight_bytes_per_step(plan) + regime.prompt * kv_bytes_per_token(plan)
    work = PlanWork(plan)
    computing = sum(
        work.of(step, load).operations / limits.peaks[peak_name(step.kernel)]
        for step in plan.steps
        if step.op in _ARITHMETIC
    )
    return load.tokens / max(nbytes / limits.bandwidth, computing)
