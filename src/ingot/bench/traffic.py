"""What one step of a Plan must move, for comparison with what the machine's memory can."""

from ingot.plan import Plan

_GATHERED = ("embedding",)  # ops that read single rows of their tables


def weight_bytes_per_step(plan: Plan) -> int:
    """Bytes of weights that a decode step reads: every weight that some op reads whole."""
    sizes = {weight.name: weight.nbytes for weight in plan.weights}
    whole = {name for step in plan.steps if step.op not in _GATHERED for name in step.inputs if name in sizes}
    return sum(sizes[name] for name in whole)


def kv_bytes_per_token(plan: Plan) -> float:
    """Bytes of keys and values that one token of context holds, over all layers."""
    return plan.kv.block_bytes / plan.kv.tokens_per_block


def decode_bytes(plan: Plan, *, batch_size: int, context: float) -> float:
    """Bytes that a decode step of `batch_size` requests with `context` tokens each reads from memory."""
    return weight_bytes_per_step(plan) + batch_size * context * kv_bytes_per_token(plan)
