"""How long the steps of a GPU engine should take, before anybody has run them.

An op takes the larger of bytes / (BYTES x bandwidth) and operations / (OPERATIONS x rate), and LAUNCH for each of its
launches; a step takes the sum of its ops. Bandwidth and rate are those of the device's data sheet (`devices.py`). What
ranks exchange takes bytes / (BYTES x bandwidth of the link), and EXCHANGE for each call of NCCL. What the host does is
not in it.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ingot.plan import Plan
from ingot.plugins.cuda.bind import bind
from ingot.plugins.cuda.devices import Device, devices_of
from ingot.plugins.cuda.plan_facts import CUBLASLT, specialisation, takes_fp8, tiles_of
from ingot.plugins.cuda.sampling import draw_kernel
from ingot.plugins.cuda.session import device_bytes
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.target import CODES
from ingot.plugins.cuda.work import Addresses, Exchange, Launch, Multiply, Work
from ingot.plugins.plan_work import PlanWork
from ingot.step_work import Load

BATCHES, CONTEXT, PROMPT = (1, 8, 64), 1024, 2048  # decode steps and the prompt of an estimate, within the limits
PRODUCT = CUBLASLT

Sequences = Sequence[tuple[int, int]]
"""(tokens before, tokens now) of each sequence of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpEstimate:
    """Ops of one kind in a step, together. kernels: what is launched for them."""

    op: str
    kernels: tuple[str, ...]
    launches: int
    nbytes: int
    operations: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepEstimate:
    """One step, or the steps of a prompt together. tokens: computed; sequences: of the batch; context: tokens before"""

    name: str
    sequences: int
    context: int
    tokens: int
    ops: tuple[OpEstimate, ...]

    @property
    def seconds(self) -> float:
        """TPOT of a decode step, TTFT of a prompt that waits for nothing."""
        return sum(each.seconds for each in self.ops)

    @property
    def launches(self) -> int:
        """All ops together."""
        return sum(each.launches for each in self.ops)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """An engine on one device. fits: whether it has room beside one sequence; only then there are steps."""

    device: Device
    fits: bool
    steps: tuple[StepEstimate, ...]

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.device.title}: the engine does not fit its {self.device.memory / 1e9:.0f} GB"
        *decodes, prompt = self.steps
        parts = [f"{1e3 * each.seconds:.3g} ms with {each.sequences}" for each in decodes]
        context = f"after {decodes[0].context:,} tokens"
        return (
            f"{self.device.title}: TPOT {context} {', '.join(parts)} at once; "
            f"TTFT of {prompt.tokens:,} tokens {1e3 * prompt.seconds:.3g} ms"
        )

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "device": dataclasses.asdict(self.device),
            "fits": self.fits,
            "steps": [
                {**dataclasses.asdict(each), "seconds": each.seconds, "launches": each.launches} for each in self.steps
            ],
        }

    def table(self) -> list[str]:
        """A line for each kind of op of each step."""
        text = []
        for step in self.steps:
            text.append(f"{self.device.title}, {step.name}: {1e3 * step.seconds:.3f} ms in {step.launches} launches")
            text += ["| op | kernels | launches | MB | GFLOP | ms |", "|---|---|---|---|---|---|"]
            text += [
                f"| {each.op} | {', '.join(each.kernels)} | {each.launches} | {each.nbytes / 1e6:,.1f} "
                f"| {each.operations / 1e9:,.2f} | {1e3 * each.seconds:.3f} |"
                for each in step.ops
            ]
        return text


def estimates(plan: Plan, target: str) -> list[Estimate]:
    """For each device of the table that a cuda target is for; none for other targets, nor for a pipeline stage, which
    is not all of a step."""
    return [] if plan.stage[1] > 1 else [estimate(plan, each) for each in devices_of(CODES.get(target, ""))]


def estimate(
    plan: Plan, device: Device, batches: Sequence[int] = BATCHES, context: int = CONTEXT, prompt: int = PROMPT
) -> Estimate:
    """batches: sequences of decode steps, those that the device has room for; context: tokens before them; prompt:
    tokens. All are lowered to the plan's limits."""
    limits = plan.limits
    longest = min(limits.max_seq_len, plan.max_positions)
    context, prompt = min(context, longest - 1), min(prompt, limits.max_input_len, longest)
    most = min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows)
    free = device.memory - device_bytes(plan)
    each = sum(group.blocks_of(context + 1) * group.block_bytes for group in plan.caches)
    sizes = [size for size in dict.fromkeys(min(size, most) for size in batches) if size * each <= free]
    if not sizes:
        return Estimate(device=device, fits=False, steps=())
    steps = [
        StepEstimate(
            name=f"decode of {size} after {context:,} tokens",
            sequences=size,
            context=context,
            tokens=size,
            ops=_ops(plan, device, [[(context, 1)] * size]),
        )
        for size in sizes
    ]
    chunk = limits.max_num_tokens
    chunks = [[(begin, min(chunk, prompt - begin))] for begin in range(0, prompt, chunk)]
    steps.append(
        StepEstimate(
            name=f"prefill of {prompt:,} tokens" + (f" in {len(chunks)} steps" if len(chunks) > 1 else ""),
            sequences=1,
            context=0,
            tokens=prompt,
            ops=_ops(plan, device, chunks),
        )
    )
    return Estimate(device=device, fits=True, steps=tuple(steps))


def _ops(plan: Plan, device: Device, steps: Sequence[Sequences]) -> tuple[OpEstimate, ...]:
    """Several steps together; the last one's logits are wanted."""
    found: dict[str, list[OpEstimate]] = {}
    for index, sequences in enumerate(steps):
        rows = len(sequences) if index == len(steps) - 1 else 0
        for each in step_ops(plan, device, Load(sequences=sequences, logit_rows=rows)):
            found.setdefault(each.op, []).append(each)
    return tuple(
        OpEstimate(
            op=op,
            kernels=tuple(dict.fromkeys(name for line in lines for name in line.kernels)),
            launches=sum(line.launches for line in lines),
            nbytes=sum(line.nbytes for line in lines),
            operations=sum(line.operations for line in lines),
            seconds=sum(line.seconds for line in lines),
        )
        for op, lines in found.items()
    )


def step_ops(plan: Plan, device: Device, load: Load) -> Iterator[OpEstimate]:
    """Every plan step under a load, then the draws."""
    work, rate = PlanWork(plan), device.rate_of(specialisation(plan).weight)
    counts, splits = _counts(plan, load)
    for bound in bind(plan, _nowhere(plan)):
        does, done = work.of(bound.step, load), [each for each in bound.work if _runs(each, counts, splits)]
        own = _fp8_rate(device) if takes_fp8(bound.step) else rate
        exchanges = [each for each in done if isinstance(each, Exchange)]
        launches = len(done) - len(exchanges)
        moved = 4 * sum(each.numbers(counts) for each in exchanges)
        exchanging = device.exchange_seconds(moved, len(exchanges))
        yield OpEstimate(
            op=bound.step.op,
            kernels=tuple(dict.fromkeys(_name(each) for each in done)),
            launches=len(done),
            nbytes=does.nbytes,
            operations=does.operations,
            seconds=device.seconds(does.nbytes, does.operations, launches, rate=own) + exchanging,
        )
    if load.logit_rows:
        does = work.draw_work(load)
        seconds = device.seconds(does.nbytes, does.operations, 1, rate=device.rate_f32)
        yield OpEstimate(
            op="draw",
            kernels=(draw_kernel(plan),),
            launches=1,
            nbytes=does.nbytes,
            operations=does.operations,
            seconds=seconds,
        )


def _fp8_rate(device: Device) -> float:
    """Operations per second. For sm_100, ptxas makes products in float16 of the instructions of warps."""
    return device.rate if device.code == "sm_100" else device.rate_fp8


def _name(work: Work) -> str:
    return work.kernel if isinstance(work, Launch) else PRODUCT if isinstance(work, Multiply) else "NCCL"


def _runs(work: Work, counts: Counts, splits: int) -> bool:
    if isinstance(work, Exchange):
        return work.numbers(counts) > 0
    if isinstance(work, Multiply):
        return work.count(counts) > 0
    return min(work.grid(counts, splits)) > 0 and not (work.only_split and splits == 1)


def _counts(plan: Plan, load: Load) -> tuple[Counts, int]:
    tiles = tiles_of(plan)
    decode = all(new == 1 for _, new in load.sequences) and tiles.decode > 0
    items = len(load.sequences) if decode else 0
    prefill = 0 if decode else sum(-(-new // tiles.prefill) for _, new in load.sequences)
    longest = plan.limits.max_seq_len  # graphs are captured for it
    counts = Counts(
        tokens=load.tokens,
        logit_rows=load.logit_rows,
        sequences=len(load.sequences),
        decode=items,
        prefill=prefill,
        longest=longest,
    )
    return counts, plan.parts_of(items, longest)


def _nowhere(plan: Plan) -> Addresses:
    """Addresses that nobody reads."""
    zeros = dict.fromkeys(
        (*("weights", "arena", "sums", "exchanged", "place"), *("drawn", "partial", "stats", "table_width")), 0
    )
    groups = len(plan.caches)
    return Addresses(kv=(0,) * groups, num_blocks=(1,) * groups, tables=defaultdict(int), **zeros)
