"""Sums that norms take, given back to the products before them where a target's products add."""

import dataclasses

import pytest

from ingot.builder.lower import LayerShape, Lowering, ModelShape, cache_groups
from ingot.builder.names import name_nodes
from ingot.builder.pipeline import run_passes, structure_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.dtypes import DType, Precision
from ingot.errors import PassError
from ingot.plan import CacheGroup, Limits, Step
from ingot.plugins.registry import find_target
from tests.passes.graphs import VOCAB, GraphMaker

LIMITS = Limits(max_batch_size=1, max_input_len=8, max_seq_len=16, max_num_tokens=8, max_logit_rows=8)
KV = CacheGroup(layers=(0,), kv_heads=1, head_dim=4, tokens_per_block=16, dtype=DType.F32)
SHAPE = ModelShape(
    positions=64, vocab_size=VOCAB, hidden_size=8, heads=1, layers=(LayerShape(0, 1, 4),), kv_dtype=DType.F32
)


def lower(g: GraphMaker, output: str, *, adding: bool) -> list[Step]:
    graph = g.finish(output)
    run_passes(graph, structure_passes())
    name_nodes(graph)
    choice = ProductChoice(precision=Precision(dtype=DType.F32), activations="bf16")
    products = {node.name: choice for node in products_of(graph)}
    run_passes(graph, target_passes(find_target("ref"), products=products, tables=DType.F32, kv=DType.F32))
    return list(Lowering(graph, adding_products=adding).plan(LIMITS, (KV,), SHAPE).steps)


def norm(g: GraphMaker, x: str) -> str:
    return g.node("RMSNormalization", x, g.weight(8), axis=-1)


def residuals(steps: list[Step]) -> dict[str, list[bool]]:
    """Which products and norms add something, in order."""
    place = {"matmul": 3, "rms_norm": 2}
    return {op: [bool(step.inputs[place[op]]) for step in steps if step.op == op] for op in place}


@pytest.mark.parametrize("adding", [False, True])
def test_the_sum_before_a_norm(adding: bool) -> None:
    g = GraphMaker()
    x = g.input()
    steps = lower(g, g.linear(norm(g, g.node("Add", x, g.linear(x, 8, 8))), 8, VOCAB), adding=adding)
    assert residuals(steps) == {"matmul": [adding, False], "rms_norm": [not adding]}


@pytest.mark.parametrize("adding", [False, True])
def test_a_product_that_is_read_twice_stays_what_it_is(adding: bool) -> None:
    """By the sum before a norm, and by another norm, which takes the product alone."""
    g = GraphMaker()
    x = g.input()
    product = g.linear(x, 8, 8)
    alone, summed = norm(g, product), norm(g, g.node("Add", x, product))
    steps = lower(g, g.node("Add", g.linear(summed, 8, VOCAB), g.linear(alone, 8, VOCAB)), adding=adding)
    assert residuals(steps)["matmul"].count(True) == 1, "only the last product adds: the other of the two"
    first = next(step for step in steps if step.op == "matmul")
    assert first.inputs[3] == ""
    assert sum(first.outputs[0] in step.inputs for step in steps) == 2


@pytest.mark.parametrize("adding", [False, True])
def test_a_product_that_adds_already_adds_nothing_else(adding: bool) -> None:
    """x + product goes into another sum, before a norm."""
    g = GraphMaker()
    x, y = g.input(), g.input()
    inner = g.node("Add", x, g.linear(x, 8, 8))
    steps = lower(g, g.linear(norm(g, g.node("Add", y, inner)), 8, VOCAB), adding=adding)
    assert residuals(steps) == {"matmul": [True, False], "rms_norm": [True]}


def groups(*layers: LayerShape, frees_windows: bool = True) -> list[tuple[int, tuple[int, ...], int]]:
    """(window, layers, KV heads) of each cache group, for sequences of at most 16 tokens."""
    shape = dataclasses.replace(SHAPE, layers=layers)
    found = cache_groups(shape, LIMITS, 16, DType.F32, frees_windows=frees_windows)
    return [(group.window, group.layers, group.kv_heads) for group in found]


def test_layers_that_are_alike_share_a_cache_group() -> None:
    full, short, wide = LayerShape(0, 1, 4), LayerShape(15, 1, 4), LayerShape(15, 2, 4)
    assert groups(full, full) == [(0, (0, 1), 1)]
    assert groups(short, full, wide, short, full) == [(15, (0, 3), 1), (0, (1, 4), 1), (15, (2,), 2)]
    assert groups(LayerShape(16, 1, 4), full) == [(0, (0, 1), 1)], "no sequence grows out of that window"


def test_sessions_that_keep_everything_take_one_group() -> None:
    full, short = LayerShape(0, 1, 4), LayerShape(15, 1, 4)
    assert groups(short, full, frees_windows=False) == [(0, (0, 1), 1)]
    with pytest.raises(PassError, match=r"share one KV cache layout(.|\n)*1 x 4, 2 x 4"):
        groups(full, LayerShape(15, 2, 4), frees_windows=False)
