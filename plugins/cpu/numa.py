"""Which memory node each part of the weights belongs to: that of the threads that read it."""

import bisect
from collections.abc import Sequence

from ingot.plan import Plan
from ingot.weights_memory import NumaPlacement

_TURN = 4 << 20  # bytes on one node before the next one's turn, where several read a part


def numa_placement(plan: Plan, cores: Sequence[tuple[int, int]], threads: int) -> NumaPlacement:
    """cores: CPU and memory node of each, in the order of the threads; thread i runs on core i % cores.

    Slice s of S is read by threads s * threads / S up to (s + 1) * threads / S; by their neighbours too, where a group
    of threads shares its last panels (`share_panels`), which mostly has one node. What threads of several nodes read,
    among it all that has no slices, lies on these in turn.
    """
    of_thread = [cores[thread % len(cores)][1] for thread in range(threads)]
    nodes = list(dict.fromkeys(of_thread))
    parts: list[tuple[int, list[int]]] = [(0, nodes)]
    for weight in plan.weights:
        slices = len(weight.pieces)
        for slice_, piece in enumerate(weight.pieces):
            first = slice_ * threads // slices
            readers = of_thread[first : max(first + 1, (slice_ + 1) * threads // slices)]
            parts.append((piece.offset, list(dict.fromkeys(readers))))
    parts.sort(key=lambda part: part[0])
    starts = [start for start, _ in parts]

    def node(offset: int) -> int:
        readers = parts[bisect.bisect_right(starts, offset) - 1][1]
        return nodes.index(readers[offset // _TURN % len(readers)])

    return NumaPlacement(
        cores=tuple(frozenset(cpu for cpu, where in cores if where == each) for each in nodes), node=node
    )
