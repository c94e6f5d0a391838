"""Where the sums of products are cut (`--sum_parts`): a part has whole heads and whole groups of codes.

3 key heads of 3 query heads    0 0 0 1 1 1 2 2 2
2 parts                         0 0 0 0 0 0 1 1 1     whole key heads
4 parts                         0 0 1 2 2 2 3 3 3     or a share of one: a rank has no key head that it hardly uses
"""

import dataclasses
import itertools
import math

from ingot.configs.ranks import require_parts

OPTION = "--sum_parts"
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Columns of a product's input that stay together.

    unit    of a head, else 1
    shared  of the heads that share a key head; such columns lie in one part, or parts lie in them, where that can be
    """

    unit: int = 1
    shared: int = 1


def part_bounds(name: str, k: int, parts: int, whole: Whole, group: int) -> list[Range]:
    """(first column, last and one) of each part: no part cuts a head or a group, and the first ones have more of them.
    Raises UsageError where there are fewer of these than parts."""
    size = math.lcm(whole.unit, group or 1)
    require_parts(OPTION, parts, name, k, size, groups=bool(group))
    together = math.lcm(whole.shared, size)
    if -(-k // together) >= parts:
        ends = _ends(k, parts, together)
    elif together == whole.shared:
        heads = k // together
        ends = [0]
        for head, (first, last) in enumerate(
            itertools.pairwise(-(-parts * each // heads) for each in range(heads + 1))
        ):
            ends += [head * together + end for end in _ends(together, last - first, size)[1:]]
    else:  # groups that several key heads have columns of
        ends = _ends(k, parts, size)
    return list(itertools.pairwise(ends))


def _ends(k: int, parts: int, size: int) -> list[int]:
    """0, and where each part ends."""
    count = -(-k // size)
    return [min(k, -(-count * part // parts) * size) for part in range(parts + 1)]
