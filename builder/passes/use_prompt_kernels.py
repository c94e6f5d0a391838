"""Attention goes to kernels that are faster for prompts, where there are some for its heads and its cache.

    paged_attention.bf16.sm80 ▶ paged_attention.bf16.sm90a

The kernel's name says so, and for which machine code there are such kernels.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable

from ingot.builder.passes.base import PassReport
from ingot.plan import CacheGroup, Plan
from ingot.plugins.registry import find_op

NAME = "use_prompt_kernels"


def use_prompt_kernels(plan: Plan, faster: Callable[[str, CacheGroup], str | None]) -> tuple[Plan, PassReport]:
    """Attention that keeps its kernel is counted as a refusal. faster: (kernel, cache that it reads) → the kernel for
    prompts, or None."""
    steps, fired, refused = [], 0, Counter[str]()
    for step in plan.steps:
        if find_op(step.op).reads_kv:
            group = plan.caches[plan.group_of(int(step.attrs["layer"]))]
            kernel = faster(step.kernel, group)
            if kernel is not None:
                step = dataclasses.replace(step, kernel=kernel)
                fired += 1
            else:
                cache = f"{group.dtype.value} for heads of {group.head_dim} dims"
                refused[f"no kernel for prompts is faster than {step.kernel} over a cache in {cache}"] += 1
        steps.append(step)
    return dataclasses.replace(plan, steps=tuple(steps)), PassReport(name=NAME, fired=fired, refused=dict(refused))
