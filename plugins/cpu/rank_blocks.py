"""KV blocks of CPU ranks, as they lie in the pools ↔ blocks of the whole model, as they lie in the pool of one rank."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.plan import CacheGroup
from ingot.plugins.rank_shares import Arrays, RankShares

Bytes = npt.NDArray[np.uint8]


class RankBlocks:
    """The blocks of one engine."""

    def __init__(self, caches: Sequence[Sequence[CacheGroup]], stages: int) -> None:
        """caches: of each rank. Raises EngineError for ranks that do not belong together."""
        self._caches, self._shares = caches, RankShares(caches, stages)

    def nbytes(self, group: int) -> int:
        """Bytes of a block of the whole model."""
        return self._shares.whole[group].block_bytes

    def parts(self, group: int) -> list[Bytes]:
        """Room for the block of each rank, and for one block of neighbours that hold the same."""
        return [np.empty(own.block_bytes, np.uint8) for own in self._owners(group)]

    def join(self, group: int, parts: Sequence[Bytes], to: Bytes) -> None:
        """to: uint8 [nbytes]."""
        self._shares.join(group, self._arrays(group, parts), _arrays(to, self._shares.whole[group]))

    def cut(self, group: int, data: Bytes) -> list[Bytes]:
        """Blocks as `parts` has room for. data: uint8 [nbytes]."""
        parts = self.parts(group)
        self._shares.cut(group, _arrays(data, self._shares.whole[group]), self._arrays(group, parts))
        return parts

    def _arrays(self, group: int, parts: Sequence[Bytes]) -> list[Arrays]:
        return [_arrays(part, own) for part, own in zip(parts, self._owners(group), strict=True)]

    def _owners(self, group: int) -> list[CacheGroup]:
        return [own[group] for own in self._caches[:: self._shares.alike[group]]]


def _arrays(block: Bytes, group: CacheGroup) -> Arrays:
    """Views: keys and values, uint8 [layers, heads, bytes of a head]; of states their numbers, as they are stored."""
    if group.state:
        return [block.view(np.uint32)]
    layers, keys = block.reshape(len(group.layers), -1), group.k_block_bytes
    parts = [layers] if group.latent else [layers[:, :keys], layers[:, keys:]]
    return [each.reshape(len(group.layers), group.kv_heads, -1) for each in parts]
