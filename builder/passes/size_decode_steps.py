"""For which numbers of sequences a session captures a decode step as a CUDA graph: powers of two, and the largest one.

    at most 6 sequences    1 2 4 6    a step of 3 is filled up to 4 with rows that nobody reads

The Plan lists the sizes; a session captures a graph of each when it opens.
"""

import dataclasses

from ingot.builder.passes.base import PassReport
from ingot.plan import Plan
from ingot.plan_check import most_decoding

NAME = "size_decode_steps"


def size_decode_steps(plan: Plan) -> tuple[Plan, PassReport]:
    """fired: sizes."""
    largest = most_decoding(plan.limits)
    sizes = (*(1 << i for i in range(largest.bit_length()) if 1 << i < largest), largest)
    return dataclasses.replace(plan, decode_sizes=sizes), PassReport(name=NAME, fired=len(sizes))
