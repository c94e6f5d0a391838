"""lm_head as a product that may leave out all logits but the best, with the weights that it needs."""

from typing import Any

import numpy as np
import pytest

from ingot.builder.lower import Lowering
from ingot.builder.names import name_nodes
from ingot.builder.passes.screen_lm_head import ScreenLmHead
from ingot.builder.pipeline import run_passes, structure_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.builder.program import Draft
from ingot.dtypes import DType, Precision
from ingot.errors import BuildError
from ingot.plugins.registry import find_target
from tests.passes.graphs import VOCAB, GraphMaker

REF = find_target("ref")


def lower(activations: str = "int8", dtype: DType = DType.W8, *, bias: bool = False, cap: bool = False) -> Lowering:
    """A graph of two products. The last one makes the logits, with a bias or a soft cap behind it."""
    g = GraphMaker()
    logits = g.linear(g.linear(g.input(), 8, 8), 8, VOCAB, bias=bias)
    if cap:
        three = g.constant(np.float32(3))
        logits = g.node("Mul", g.node("Tanh", g.node("Div", logits, three)), three)
    graph = g.finish(logits)
    run_passes(graph, structure_passes())
    name_nodes(graph)
    choice = ProductChoice(precision=Precision(dtype=dtype), activations=activations)
    products = {node.name: choice for node in products_of(graph)}
    run_passes(graph, target_passes(REF, products=products, tables=dtype, kv=DType.F32))
    return Lowering(graph)


def screened(lowering: Lowering, target: str = "ref") -> tuple[Draft, ...]:
    made, report = ScreenLmHead(lowering=lowering, target=find_target(target))(lowering.program)
    assert (report.fired, report.refused) == (1, {})
    return made.steps


def test_the_last_product_alone() -> None:
    lowering = lower()
    before = lowering.program.steps
    *others, head = screened(lowering)
    assert others == list(before[:-1])
    assert (head.name, head.op, head.outputs) == (before[-1].name, "screened_matmul", before[-1].outputs)
    x, weight, codes, dither, table, rows = head.inputs
    assert (x, weight, rows) == (*before[-1].inputs[:2], "whole_rows")
    assert head.attrs["product"] == before[-1].kernel
    assert head.attrs["estimate"] == "matmul.w4a8.ref"
    uses = {use.name: use for use in lowering.uses}
    assert [str(uses[str(name)].precision) for name in (codes, table)] == ["w4g128", "w8"]
    assert uses[str(dither)].shape == (8,)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activations": "f32"}, "lm_head takes f32 activations"),
        ({"activations": "f32", "dtype": DType.F32}, "lm_head is f32"),
        ({"bias": True}, "lm_head has a bias"),
        ({"cap": True}, "the logits come from softcap"),
    ],
)
def test_refusals(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BuildError) as refused:
        screened(lower(**options))
    assert reason in str(refused.value.got)


def test_a_target_without_a_kernel() -> None:
    with pytest.raises(BuildError, match="--screen_lm_head is not supported on cuda/sm90"):
        screened(lower(), "cuda/sm90")
