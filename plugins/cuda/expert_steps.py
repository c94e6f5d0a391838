"""The work that steps of experts share: routing, the lists of rows, products that differ by what they take."""

from collections.abc import Iterator

from ingot.dtypes import DType
from ingot.plan import Step
from ingot.plugins.cuda.experts import (
    ExpertProduct,
    Taken,
    expert_kernels,
    expert_launch,
    route_launch,
    sort_kernels,
    sort_launch,
)
from ingot.plugins.cuda.plan_facts import takes_fp8
from ingot.plugins.cuda.plan_places import PlanPlaces
from ingot.plugins.cuda.tilings import by_warpgroups, in_ranges, require_tile
from ingot.plugins.cuda.work import Launch, Work


class ExpertSteps(PlanPlaces):
    """One method per op, as in bind.py; the products are there."""

    def moe_route(self, step: Step, narrow: bool) -> list[Work]:
        logits, bias = step.inputs
        ids, weights = (self._buffer(name) for name in step.outputs)
        x, given = self._buffers[logits], self._weight(bias)
        at = self._buffer(logits)
        return [route_launch(step.attrs, ids=ids, weights=weights, logits=at, bias=given, experts=x.cols, rows=x.rows)]

    def sort_by_expert(self, step: Step, narrow: bool) -> list[Work]:
        ids, lists, experts = step.inputs[0], step.outputs[0], int(step.attrs["experts"])
        taken, tiles = self._taken(ids, lists, experts), in_ranges(self._plan, step)
        for tile, _ in tiles:
            require_tile(step, tile, sort_kernels(exact=self._types.weight is DType.F32))
        self._sorted[lists] = ids, experts, tuple((tile.rows, rows) for tile, rows in tiles)
        return [sort_launch(taken, tile, rows) for tile, rows in tiles]

    def _expert_product(self, step: Step, x: str, name: str, bias: str, scales: list[str]) -> ExpertProduct:
        """Without its output. scales: of x, where that has been rounded to FP8."""
        weight = self._weights[name]
        _, n, k = weight.shape
        return ExpertProduct(
            y=0,
            x=self._buffer(x),
            scales=self._buffer(scales[0]) if scales else None,
            weight=self._weight(name),
            bias=self._weight(bias),
            n=n,
            k=k,
            each=1,
            gated=False,
            kind=0,
            narrow=False,
            dtype=weight.dtype,
            group=int(str(step.attrs["group"])),
        )

    def _expert_launches(self, step: Step, product: ExpertProduct, taken: Taken) -> Iterator[Launch]:
        wide = by_warpgroups(step, product.k, product.dtype)
        known = expert_kernels(product.dtype, wide=wide, fp8=takes_fp8(step))
        for tile, rows in in_ranges(self._plan, step):
            require_tile(step, tile, known)
            yield expert_launch(product, taken, tile, rows)
