"""A cache of latents, and what reads and writes it."""

from ingot.dtypes import DType
from ingot.plan import Attr, CacheGroup

RANK, WIDTH = 8, 12
CACHE: dict[str, Attr] = {"layer": 1, "heads": 3, "kv_heads": 1, "head_dim": WIDTH, "rank": RANK}


def latent_group(
    tokens_per_block: int = 3, width: int = WIDTH, rank: int = RANK, dtype: DType = DType.F32
) -> CacheGroup:
    return CacheGroup(layers=(0, 1), kv_heads=1, head_dim=WIDTH, tokens_per_block=3, dtype=DType.F32, latent=RANK)
