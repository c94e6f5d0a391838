"""What a step must move and compute: one use of an op under a load, and the rule that most ops follow.

Each op states its rule as `Op.work`; `plan_work.py` asks it for the steps of a plan.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ingot.errors import REBUILD, EngineError
from ingot.plan import Attr, CacheGroup, Weight
from ingot.step_work import Load, Work


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OpUse:
    """One step of a plan under a load.

    cache             the cache group of its layer; None where it uses no cache
    weights           of each input; None for an activation and an absent input
    cols              columns of each input that is an activation, else None
    out_cols          columns of the first output, 0 without
    activation_bytes  of all inputs and outputs
    rows              that the step computes, at least one
    inside            the calls of other steps compute it, or a part of it (Variant.inside)
    """

    attrs: Mapping[str, Attr]
    cache: CacheGroup | None
    load: Load
    rows: int
    weights: Sequence[Weight | None]
    cols: Sequence[int | None]
    out_cols: int
    activation_bytes: int
    inside: bool = False

    def weight(self, index: int) -> Weight:
        """Input `index`, a weight. Raises EngineError where a damaged plan has none."""
        weight = self.weights[index]
        if weight is None:
            raise EngineError(
                "a kernel call of the plan takes no weight where its op does", got=f"input {index}", hint=REBUILD
            )
        return weight

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights if weight is not None)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of a token in one layer."""
        assert self.cache is not None, "Op.uses_kv"
        return (self.cache.k_block_bytes + self.cache.v_block_bytes) // self.cache.tokens_per_block


WorkRule = Callable[[OpUse], Work]


def plain_work(use: OpUse) -> Work:
    """Everything is read or written once, with two operations for each element of the output."""
    return Work(nbytes=use.activation_bytes + use.weight_bytes, operations=2 * use.rows * use.out_cols)


def experts_work(use: OpUse) -> Work:
    """Work of products with experts: the first weight is [experts, N, K], and the second input has their numbers."""
    found = [each for each in use.weights if each is not None]
    weight, slots = found[0] if found else use.weight(-1), use.cols[1] or 0
    _, n, k = weight.shape
    read = expert_bytes(weight, slots, use.rows)
    beside = sum(each.nbytes for each in found[1:]) * read // weight.nbytes
    return Work(nbytes=use.activation_bytes + read + beside, operations=2 * use.rows * slots * n * k)


def expert_bytes(weight: Weight, slots: int, rows: float) -> int:
    """Bytes of the experts that `rows` rows choose, if each row chooses at random."""
    untaken: float = (1 - slots / weight.shape[0]) ** rows
    return round(weight.nbytes * (1 - untaken))
