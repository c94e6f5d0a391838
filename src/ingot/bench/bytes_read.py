"""What one step of a Plan must move, and what the memory that holds its weights can."""

import dataclasses
from collections.abc import Iterable

from ingot.bench.timing import GREEDY
from ingot.configs.sampling import SamplingParams
from ingot.plan import Plan, Step
from ingot.plugins.cpu.native import read_bandwidth
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import WithMemory
from ingot.plugins.work import expert_bytes


def best_rows(sampling: SamplingParams, requests: int) -> int:
    """Rows of logits of which steps of this many requests want nothing but the best token; 0: they want more."""
    plain = dataclasses.replace(sampling, max_tokens=GREEDY.max_tokens, seed=GREEDY.seed) == GREEDY
    return requests if plain else 0


def weight_bytes_per_step(plan: Plan, rows: float = 1, *, best_rows: int = 0) -> int:
    """Bytes of weights that a step of `rows` tokens reads: every weight that some op reads whole, and as many
    experts as the rows choose, if each row chooses at random. best_rows: see the function."""
    weights = {weight.name: weight for weight in plan.weights}
    read = {name: step for step in plan.steps for name in _read_whole(step, best_rows) if name in weights}
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    return sum(
        expert_bytes(weights[name], cols[step.inputs[1]], rows) if find_op(step.op).experts else weights[name].nbytes
        for name, step in read.items()
    )


def kv_bytes_per_token(plan: Plan) -> float:
    """Bytes of keys and values that one token of context holds, over all layers."""
    return plan.block_bytes / plan.tokens_per_block


def _read_whole(step: Step, best_rows: int) -> Iterable[str]:
    """Names among which are the weights that a step reads whole."""
    op = find_op(step.op)
    places = op.reads(best_rows) if op.reads else (i for i in range(len(step.inputs)) if i not in op.tables)
    return (step.inputs[place] for place in places)


def state_bytes(plan: Plan) -> int:
    """Bytes of a request's recurrent states, which every token changes."""
    return sum(group.block_bytes for group in plan.caches if group.state)


def decode_bytes(plan: Plan, *, batch_size: int, context: float, best_rows: int = 0) -> float:
    """Bytes that a decode step of `batch_size` requests with `context` tokens each reads from memory; of states also
    what it writes."""
    of_request = context * kv_bytes_per_token(plan) + 2 * state_bytes(plan)
    return weight_bytes_per_step(plan, batch_size, best_rows=best_rows) + batch_size * of_request


def machine_bandwidth(target: str, nbytes: int, threads: int | None = None) -> float:
    """Bytes per second of a buffer of this many, in the memory where an engine of this target has its weights."""
    found = find_target(target)
    return found.read_bandwidth(nbytes) if isinstance(found, WithMemory) else read_bandwidth(nbytes, threads)
