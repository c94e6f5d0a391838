"""In which order threads that have parted run, so that they are together again where their ways meet."""

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping

from tests.plugins.cuda.ptx.parse import Kernel

Edges = Mapping[int, Collection[int]]


@functools.lru_cache(maxsize=64)
def ranks(kernel: Kernel) -> tuple[int, ...]:
    """For each instruction its place in the order; the place behind the last one is that of the kernel's end.

    An instruction comes behind all that lead to it, and behind a whole loop if it follows the loop: threads of lower
    rank cannot be led past those that wait at a higher one. Where the compiler has put the instruction does not count.
    """
    count = len(kernel.instructions)
    starts = sorted({0, count, *kernel.labels.values(), *(at + 1 for at in range(count) if _leaves(kernel, at))})
    ends = dict(itertools.pairwise(starts))
    edges = {start: _next(kernel, end - 1) for start, end in ends.items()} | {count: ()}
    places = [0] * (count + 1)
    rank = 0
    for start in _ordered(set(_reached([0], edges, starts)), edges, 0):
        for at in range(start, ends.get(start, start + 1)):
            places[at], rank = rank, rank + 1
    return tuple(places)


def _leaves(kernel: Kernel, at: int) -> bool:
    return kernel.instructions[at].op[0] in ("bra", "ret", "exit")


def _next(kernel: Kernel, at: int) -> tuple[int, ...]:
    """Where a thread may go behind an instruction."""
    each = kernel.instructions[at]
    if not _leaves(kernel, at):
        return (at + 1,)
    target = (kernel.labels[each.operands[0]],) if each.op[0] == "bra" else ()
    return (*target, at + 1) if each.guard else target


def _reached(nodes: Iterable[int], edges: Edges, within: Collection[int]) -> list[int]:
    """What can be reached from nodes, themselves included; each behind what was first reached from it."""
    left = set(within)
    found: list[int] = []
    for node in nodes:
        way = [(node, iter(edges[node]))] if node in left else []
        left.discard(node)
        while way:
            here, ahead = way[-1]
            for after in ahead:
                if after in left:
                    left.remove(after)
                    way.append((after, iter(edges[after])))
                    break
            else:
                found.append(here)
                way.pop()
    return found


def _ordered(nodes: Collection[int], edges: Edges, entry: int) -> list[int]:
    """Strongly connected components as they follow each other (Kosaraju's algorithm); inside a loop, the same without
    what leads back to its first node."""
    before: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        for each in edges[node]:
            if each in before:
                before[each].append(node)
    ordered: list[int] = []
    left = set(nodes)
    for node in reversed(_reached([entry, *sorted(nodes)], edges, nodes)):
        loop = set(_reached([node], before, left))
        left -= loop
        if len(loop) <= 1:
            ordered += loop
            continue
        first = min((each for each in loop if each == entry or not loop.issuperset(before[each])), default=min(loop))
        ordered += _ordered(loop, {each: [to for to in edges[each] if to != first] for each in loop}, first)
    return ordered
