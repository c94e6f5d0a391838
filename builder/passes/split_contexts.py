"""Attention of few new tokens cuts long contexts into parts, so that a few sequences fill a GPU.

    1 item    parts 0 1 2 ... 63          4 items    parts 0 1 ... 15          64 items    whole contexts

The fewer items a step has, the more parts there are. The Plan states how many; a session looks the number up.
"""

import dataclasses

from ingot.builder.passes.base import PassReport
from ingot.plan import Plan, Split
from ingot.plugins.registry import find_op
from ingot.plugins.split_rules import SplitRules

NAME = "split_contexts"


def split_contexts(plan: Plan, rules: SplitRules) -> tuple[Plan, PassReport]:
    """fired: attention calls of a plan whose contexts are cut."""
    attention = [step for step in plan.steps if find_op(step.op).reads_kv]
    if (reason := _refusal(plan, rules, bool(attention))) is not None:
        return plan, PassReport(name=NAME, fired=0, refused={reason: len(attention)})
    latent = max((int(step.attrs["heads"]) for step in attention), default=0) if plan.caches[0].latent else 0
    tiles = -(-latent // rules.latent_rows) if latent else _kv_heads(plan)
    made = dataclasses.replace(plan, splits=_splits(plan, rules, tiles))
    return made, PassReport(name=NAME, fired=len(attention))


def _kv_heads(plan: Plan) -> int:
    """Fewest thread blocks of an item, in layers that see whole contexts if there are some: those have most to do. With
    those of other ranks: so all engines of a model cut contexts alike, and give the same bits."""
    with_heads = [each for each in plan.caches if not each.state]
    whole = [each for each in with_heads if not each.window]
    return min(each.heads_before + each.kv_heads + each.heads_behind for each in whole or with_heads)


def _refusal(plan: Plan, rules: SplitRules, attends: bool) -> str | None:
    """Why contexts stay whole."""
    dtype = plan.caches[0].dtype
    if dtype not in rules.dtypes:
        return f"no kernel reads a KV cache in {dtype.value} in parts"
    if attends and not plan.decode_tokens:
        return f"more than {rules.group} query heads share a KV head"
    if plan.limits.max_seq_len < 2 * rules.least_tokens:
        return f"no context has {2 * rules.least_tokens} tokens"
    return None


def _splits(plan: Plan, rules: SplitRules, tiles: int) -> tuple[Split, ...]:
    """A line for each number of parts, from many to one. tiles: thread blocks that compute an item which is whole."""
    longest = plan.limits.max_seq_len
    most: dict[int, int] = {}  # parts → the largest number of items that are cut into as many
    for items in range(1, plan.limits.max_batch_size + 1):
        wanted = min(rules.blocks // (items * tiles), rules.parts, longest // rules.least_tokens)
        most[max(1, wanted)] = items
    return tuple(Split(most_items=items, parts=parts, least_tokens=rules.least_tokens) for parts, items in most.items())
