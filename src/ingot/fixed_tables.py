"""Block tables for runs that no scheduler looks after: every sequence keeps its blocks, which lie in no order.

A state stays in one slot, whichever block its sequence has come to.
"""

import numpy as np

from ingot.plan import Plan
from ingot.step_io import Int32


def blocks_needed(plan: Plan, *, sequences: int, length: int) -> tuple[int, ...]:
    """Blocks of each cache group for this many sequences of `length` tokens."""
    return plan.in_each(sequences * -(-length // plan.tokens_per_block), sequences)


def fixed_tables(plan: Plan, *, sequences: int, length: int) -> Int32:
    """[groups, sequences, blocks]"""
    width = -(-length // plan.tokens_per_block)
    order = np.random.default_rng(0).permutation(sequences * width).reshape(sequences, width)
    slots = np.repeat(np.arange(sequences)[:, None], width, axis=1)
    return np.stack([slots if group.state else order for group in plan.caches]).astype(np.int32)
