"""When attention of few new tokens cuts contexts into parts: the builder writes the parts into the Plan by these."""

import dataclasses

from ingot.dtypes import DType


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitRules:
    """When a target's attention of few new tokens cuts the contexts of a step into parts.

    blocks        thread blocks that fill the largest GPU of the target: there are no more parts than that
    parts         of a context, at most
    least_tokens  of a part
    dtypes        of a KV cache that kernels read in parts
    group         query heads of a KV head, at most
    latent_rows   query heads of latent attention, where any number is, that a thread block computes
    """

    blocks: int
    parts: int
    least_tokens: int
    dtypes: frozenset[DType]
    group: int
    latent_rows: int
