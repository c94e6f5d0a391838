"""Plan → StepCost: what one rank of an engine moves and computes in a step, as numbers that any load multiplies.

The numbers come from `PlanWork`, the account that `bench kernels` and `inspect` keep, asked about a few small loads.
"""

import dataclasses
from collections import Counter

import numpy as np
import numpy.typing as npt

from ingot.plan import Plan, Rows, Step
from ingot.plugins.plan_work import PlanWork
from ingot.plugins.registry import find_op
from ingot.step_work import Load, Work

Int64 = npt.NDArray[np.int64]
_FLOAT = 4  # bytes of a number that ranks exchange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheCost:
    """Layers whose caches are alike. window: tokens that a row sees, 0 for all. token_bytes: of keys and values of one
    token; operations: of one row with one token; state_bytes: of each sequence, whatever its length."""

    window: int = 0
    token_bytes: float = 0.0
    operations: float = 0.0
    state_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """One rank. Bytes and operations; a multiply-add is two.

    resident      bytes of weights and buffers
    weights       bytes that every step reads; head: those that steps with logits read beside
    experts       bytes of all experts; drawn_experts: of those that rows of logits alone come to, in the last layer
    taken         the share of experts that one row chooses
    row_bytes, row_operations      for each row, beside attention
    logit_bytes, logit_operations  for each row of logits
    layers        that have attention, a state or experts
    collectives   of a step in which ranks meet; met_bytes: of a row in each; gathered_bytes: of a row of logits
    messages      to the next pipeline stage in a step; sent_bytes: of a row in all of them
    draws         whether this rank's stage is the last one, whose host schedules and draws
    arithmetic    of most products: "f32", "bf16", "int8"
    """

    resident: float
    weights: float
    head: float
    experts: float = 0.0
    drawn_experts: float = 0.0
    taken: float = 0.0
    row_bytes: float = 0.0
    row_operations: float
    logit_bytes: float = 0.0
    logit_operations: float = 0.0
    caches: tuple[CacheCost, ...]
    layers: int
    collectives: int = 0
    met_bytes: float = 0.0
    gathered_bytes: float = 0.0
    messages: int = 0
    sent_bytes: float = 0.0
    draws: bool = True
    arithmetic: str = "bf16"

    def sequence_bytes(self, tokens: int) -> float:
        """KV cache of one sequence."""
        seen = (min(tokens, each.window) if each.window else tokens for each in self.caches)
        return sum(n * each.token_bytes + each.state_bytes for n, each in zip(seen, self.caches, strict=True))


def plan_cost(plan: Plan) -> StepCost:
    """What a step of one rank costs, from its plan."""
    work = PlanWork(plan)
    attention = [step for step in plan.steps if find_op(step.op).reads_kv]
    experts = [step for step in plan.steps if find_op(step.op).experts]
    rest = [step for step in plan.steps if step not in attention and step not in experts]

    def of(steps: list[Step], rows: int, logit_rows: int, past: int = 0) -> Work:
        load = Load(sequences=[(past, 1)] * rows, logit_rows=logit_rows, best_only=True)
        return sum((work.of(step, load) for step in steps), Work(nbytes=0, operations=0))

    one, two, one_drawn, two_drawn = (of(rest, rows, drawn) for rows, drawn in ((1, 0), (2, 0), (1, 1), (2, 2)))
    row_bytes, row_operations = two.nbytes - one.nbytes, two.operations - one.operations
    drawn = [(a.nbytes - b.nbytes, a.operations - b.operations) for a, b in ((one_drawn, one), (two_drawn, two))]
    logit_bytes, logit_operations = (b - a for a, b in zip(*drawn, strict=True))
    weights = {weight.name: weight for weight in plan.weights}
    by_tokens = {buffer.name for buffer in plan.buffers if buffer.rows is Rows.TOKENS}
    stored: dict[bool, float] = {True: 0.0, False: 0.0}  # of experts, by whether all rows come to them
    taken = 0.0
    for step in experts:
        own = [weights[name] for name in step.inputs if name in weights]
        stored[step.outputs[0] in by_tokens] += sum(each.nbytes for each in own)
        taken = _slots(plan, step) / own[0].shape[0]
    expert_operations = [of(experts, 1, rows).operations for rows in (0, 1)]
    reduced, gathered = _meetings(plan)
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    sent = [cols[step.inputs[0]] for step in plan.steps if find_op(step.op).transfer is not None and step.inputs]
    return StepCost(
        resident=plan.weight_bytes + plan.arena_bytes,
        weights=one.nbytes - row_bytes,
        head=drawn[0][0] - logit_bytes,
        experts=stored[True],
        drawn_experts=stored[False],
        taken=taken,
        row_bytes=row_bytes,
        row_operations=row_operations + expert_operations[0],
        logit_bytes=logit_bytes,
        logit_operations=logit_operations + expert_operations[1] - expert_operations[0],
        caches=_caches(plan, work, attention),
        layers=plan.num_layers,
        collectives=len(reduced),
        met_bytes=_FLOAT * max(reduced, default=0),
        gathered_bytes=_FLOAT * sum(gathered),
        messages=len(sent),
        sent_bytes=_FLOAT * sum(sent),
        draws=bool(plan.logits),
        arithmetic=_arithmetic(plan),
    )


def _slots(plan: Plan, step: Step) -> int:
    """Experts that a row takes."""
    return next(buffer.cols for buffer in plan.buffers if buffer.name == step.inputs[1])


def _caches(plan: Plan, work: PlanWork, attention: list[Step]) -> tuple[CacheCost, ...]:
    found = []
    for group in plan.caches:
        own = [step for step in attention if int(step.attrs["layer"]) in group.layers]
        seen = [Load(sequences=[(past, 1)], logit_rows=1) for past in (0, 1)]
        first, second = (sum(work.of(step, load).operations for step in own) for load in seen)
        size = group.block_bytes / plan.tokens_per_block
        found.append(
            CacheCost(state_bytes=2.0 * group.block_bytes)
            if group.state
            else CacheCost(window=group.window, token_bytes=size, operations=second - first)
        )
    return tuple(found)


def _meetings(plan: Plan) -> tuple[list[int], list[int]]:
    """Columns that ranks add up in each collective, and those that they put together."""
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    met = [step for step in plan.steps if find_op(step.op).collective is not None]
    reduced = [cols[step.inputs[0]] for step in met if "columns" not in step.attrs]
    return reduced, [int(step.attrs["columns"]) for step in met if "columns" in step.attrs]


def _arithmetic(plan: Plan) -> str:
    rounded = (str(step.attrs["activations"]) for step in plan.steps if "activations" in step.attrs)
    counts = Counter(each.removesuffix("_inputs") for each in rounded)
    return counts.most_common(1)[0][0] if counts else "f32"
