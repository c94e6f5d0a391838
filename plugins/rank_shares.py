"""Which part of a KV block each rank of an engine holds: the layers of its stage, and there its key heads.

    a block of the model        layers 0 1 2 3, heads 0 1
    tp 2 x pp 2, rank 0         layers     2 3, head  0       rank 1   layers     2 3, head    1
                 rank 2         layers 0 1    , head  0       rank 3   layers 0 1    , head    1

A block of the whole model is the block of an engine of one rank. Where there are more ranks than key heads, several
neighbours hold the same one; all ranks of a stage hold the same latents, and the same states.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, EngineError
from ingot.plan import CacheGroup

Arrays = Sequence[npt.NDArray[np.generic]]
"""A block: [layers, heads, ...] each; of states one array, [numbers]."""


class RankShares:
    """whole: the cache groups of the model. alike: of each group, how many neighbours hold the same, always as many."""

    def __init__(self, caches: Sequence[Sequence[CacheGroup]], stages: int) -> None:
        """caches: of each rank. Raises EngineError for ranks that do not belong together."""
        self._caches, self._places = caches, len(caches) // stages
        if self._places * stages != len(caches):
            raise _mixed("stages", "as many ranks in each stage", f"{len(caches)} ranks, {stages} stages")
        if any(len(each) != len(caches[0]) for each in caches):
            raise _mixed("caches", f"{len(caches[0])} groups", ", ".join(str(len(each)) for each in caches))
        self.whole = tuple(self._put_together(group) for group in range(len(caches[0])))
        shares = [[self._share(group, rank) for rank in range(len(caches))] for group in range(len(caches[0]))]
        self.alike = [self._count_alike(each) for each in shares]
        self._shares = [each[::alike] for each, alike in zip(shares, self.alike, strict=True)]

    def join(self, group: int, parts: Sequence[Arrays], whole: Arrays) -> None:
        """Put together what the ranks hold. parts: of the first rank of those that are alike."""
        for share, own in zip(self._shares[group], parts, strict=True):
            for to, each in zip(whole, own, strict=True):
                to[share] = each

    def cut(self, group: int, whole: Arrays, parts: Sequence[Arrays]) -> None:
        """The inverse."""
        for share, own in zip(self._shares[group], parts, strict=True):
            for each, to in zip(whole, own, strict=True):
                to[...] = each[share]

    def _count_alike(self, shares: Sequence[tuple[slice, ...]]) -> int:
        counts = (count for count in range(self._places, 1, -1) if self._places % count == 0)
        firsts = {count: [shares[rank // count * count] for rank in range(len(shares))] for count in counts}
        return next((count for count, first in firsts.items() if first == list(shares)), 1)

    def _in_order(self, group: int) -> list[CacheGroup]:
        """Those of the first rank of each stage, the first stage first: the last one has the first ranks."""
        return [caches[group] for caches in self._caches[:: self._places]][::-1]

    def _put_together(self, group: int) -> CacheGroup:
        stages = self._in_order(group)
        first = stages[0]
        heads = first.heads_before + first.kv_heads + first.heads_behind
        whole = dataclasses.replace(
            first,
            layers=tuple(range(sum(len(each.layers) for each in stages))),
            state=tuple(size for each in stages for size in each.state),
            kv_heads=heads,
            heads_before=0,
            heads_behind=0,
        )
        for rank, caches in enumerate(self._caches):
            own, its = caches[group], stages[self._stage(rank)]
            all_heads = own.heads_before + own.kv_heads + own.heads_behind
            alike = dataclasses.replace(own, layers=whole.layers, state=whole.state)
            alike = dataclasses.replace(alike, kv_heads=all_heads, heads_before=0, heads_behind=0)
            if alike != whole or (own.layers, own.state) != (its.layers, its.state):
                raise _mixed(f"rank {rank}: caches.{group}", f"a part of {whole}", str(own))
        return whole

    def _stage(self, rank: int) -> int:
        return len(self._caches) // self._places - 1 - rank // self._places

    def _share(self, group: int, rank: int) -> tuple[slice, ...]:
        own = self._caches[rank][group]
        before = sum(len(each.layers) for each in self._in_order(group)[: self._stage(rank)])
        if own.state:
            offsets = self.whole[group].state_offsets
            return (slice(offsets[before], offsets[before + len(own.layers)]),)
        heads = slice(own.heads_before, own.heads_before + own.kv_heads)
        return slice(before, before + len(own.layers)), heads


def _mixed(where: str, expected: str, got: str) -> EngineError:
    return EngineError(
        "the rank files of the engine do not belong together", where=where, expected=expected, got=got, hint=REBUILD
    )
