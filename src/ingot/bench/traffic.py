"""What one step of a Plan must move, for comparison with what the machine's memory can."""

from ingot.plan import Plan
from ingot.step_work import EXPERTS, expert_bytes

_GATHERED = ("embedding",)  # ops that read single rows of their tables


def weight_bytes_per_step(plan: Plan, rows: float = 1) -> int:
    """Bytes of weights that a step of `rows` tokens reads: every weight that some op reads whole, and of the experts
    as many as the rows take if each takes its own at random."""
    weights = {weight.name: weight for weight in plan.weights}
    read = {name: step for step in plan.steps if step.op not in _GATHERED for name in step.inputs if name in weights}
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    return sum(
        expert_bytes(weights[name], cols[step.inputs[1]], rows) if step.op in EXPERTS else weights[name].nbytes
        for name, step in read.items()
    )


def kv_bytes_per_token(plan: Plan) -> float:
    """Bytes of keys and values that one token of context holds, over all layers."""
    return plan.kv.block_bytes / plan.kv.tokens_per_block


def decode_bytes(plan: Plan, *, batch_size: int, context: float) -> float:
    """Bytes that a decode step of `batch_size` requests with `context` tokens each reads from memory."""
    return weight_bytes_per_step(plan, batch_size) + batch_size * context * kv_bytes_per_token(plan)
