"""What the KV cache of a plan takes, in numbers and in lines for people."""

from ingot.configs.sizes import format_bytes
from ingot.plan import STATE_SLOTS, CacheGroup, Plan
from ingot.runtime.memory import least_kv_bytes


def bytes_per_token(group: CacheGroup) -> int:
    """0: what the group keeps is as large for every number of tokens."""
    return 0 if group.state else group.block_bytes // group.tokens_per_block


def sequence_bytes(plan: Plan) -> int:
    """Bytes of the cache that the longest sequence has in the end. Its last token is never fed back."""
    return sum(group.blocks_of(plan.limits.max_seq_len - 1) * group.block_bytes for group in plan.caches)


def least_bytes(plan: Plan) -> int:
    """The least --kv_cache_memory: while a prompt is read, layers with windows hold a step's tokens as well."""
    return least_kv_bytes(plan.caches, plan.limits)


def cache_lines(plan: Plan) -> list[str]:
    """One for a plan whose layers keep every token."""
    size = f"{plan.tokens_per_block} tokens a block"
    if len(plan.caches) == 1 and not plan.caches[0].window:
        (group,) = plan.caches
        return [f"KV cache    {group.dtype.value}, {format_bytes(bytes_per_token(group))} a token, {size}"]
    lines = [
        f"KV cache    {group.dtype.value}, {format_bytes(bytes_per_token(group))} for "
        + (f"each of the last {group.window} tokens" if group.window else "every token")
        + f" in {len(group.layers)} layers, {size}"
        for group in plan.caches
        if not group.state
    ]
    lines += [
        f"states      {group.dtype.value}, {format_bytes(group.block_bytes)} a slot; {STATE_SLOTS} slots a sequence"
        for group in plan.caches
        if group.state
    ]
    longest = plan.limits.max_seq_len
    return [
        *lines,
        f"            {format_bytes(sequence_bytes(plan))} for a sequence of {longest} tokens, "
        f"--kv_cache_memory at least {format_bytes(least_bytes(plan))}",
    ]
