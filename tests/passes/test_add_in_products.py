"""Sums that norms take, given back to the products before them where a target's products add."""

import pytest

from ingot.builder.lower import LayerShape, Lowering, ModelShape
from ingot.builder.names import name_nodes
from ingot.builder.passes.add_in_products import add_in_products
from ingot.builder.passes.base import PassReport
from ingot.builder.pipeline import run_passes, step_passes, structure_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.dtypes import DType, Precision
from ingot.plan import CacheGroup, Limits, Step
from ingot.plugins.registry import find_target
from tests.passes.graphs import VOCAB, GraphMaker

LIMITS = Limits(max_batch_size=1, max_input_len=8, max_seq_len=16, max_num_tokens=8, max_logit_rows=8)
KV = CacheGroup(layers=(0,), kv_heads=1, head_dim=4, tokens_per_block=16, dtype=DType.F32)
SHAPE = ModelShape(
    positions=64, vocab_size=VOCAB, hidden_size=8, heads=1, layers=(LayerShape(0, 1, 4),), states=(), kv_dtype=DType.F32
)


def lower(g: GraphMaker, output: str) -> Lowering:
    graph = g.finish(output)
    run_passes(graph, structure_passes())
    name_nodes(graph)
    choice = ProductChoice(precision=Precision(dtype=DType.F32), activations="bf16")
    products = {node.name: choice for node in products_of(graph)}
    run_passes(graph, target_passes(find_target("ref"), products=products, tables=DType.F32, kv=DType.F32))
    return Lowering(graph)


def before_and_after(g: GraphMaker, output: str) -> tuple[list[Step], list[Step], PassReport]:
    """The steps that the graph becomes, what the pass makes of them, and its report."""
    lowering = lower(g, output)
    program, report = add_in_products(lowering.program)
    before, after = (lowering.plan(each, LIMITS, (KV,), SHAPE).steps for each in (lowering.program, program))
    return list(before), list(after), report


def norm(g: GraphMaker, x: str) -> str:
    return g.node("RMSNormalization", x, g.weight(8), axis=-1)


def residuals(steps: list[Step]) -> dict[str, list[bool]]:
    """Which products and norms add something, in order."""
    place = {"matmul": 3, "rms_norm": 2}
    return {op: [bool(step.inputs[place[op]]) for step in steps if step.op == op] for op in place}


def test_the_sum_before_a_norm() -> None:
    g = GraphMaker()
    x = g.input()
    before, after, report = before_and_after(g, g.linear(norm(g, g.node("Add", x, g.linear(x, 8, 8))), 8, VOCAB))
    assert residuals(before) == {"matmul": [False, False], "rms_norm": [True]}
    assert residuals(after) == {"matmul": [True, False], "rms_norm": [False]}
    assert (report.fired, report.refused) == (1, {})


def test_the_sum_that_the_stream_goes_on_with_is_the_products() -> None:
    """The norm gave it as well; the product comes right before the norm now, and writes it."""
    g = GraphMaker()
    x = g.input()
    total = g.node("Add", x, g.linear(x, 8, 8))
    lowering = lower(g, g.linear(g.node("Add", total, norm(g, total)), 8, VOCAB))
    program, report = add_in_products(lowering.program)
    assert report.fired == 1
    at = next(i for i, step in enumerate(program.steps) if step.op == "rms_norm")
    product, made = program.steps[at - 1], program.steps[at]
    given = next(step for step in lowering.program.steps if step.op == "rms_norm")
    assert (product.op, product.outputs) == ("matmul", given.outputs[1:])
    assert (made.inputs[0], made.outputs[1]) == (product.outputs[0], None)
    assert program.tensors()[product.name] == (total,)
    plan = lowering.plan(program, LIMITS, (KV,), SHAPE)
    used = {name for step in plan.steps for name in (*step.inputs, *step.outputs)}
    assert {buffer.name for buffer in plan.buffers} <= used, "what the product wrote before has no place any more"


def test_a_sum_without_a_name_in_the_graph_is_no_tensor_of_it() -> None:
    """Nobody but the norm reads it: `verify` must not hold the product's result against the source's product."""
    g = GraphMaker()
    x = g.input()
    lowering = lower(g, g.linear(norm(g, g.node("Add", x, g.linear(x, 8, 8))), 8, VOCAB))
    program, _ = add_in_products(lowering.program)
    first = next(step.name for step in program.steps if step.op == "matmul")
    assert lowering.program.tensors()[first] != ("",)
    assert program.tensors()[first] == ("",)


def test_a_product_that_is_read_twice_stays_what_it_is() -> None:
    """By the sum before a norm, and by another norm, which takes the product alone."""
    g = GraphMaker()
    x = g.input()
    product = g.linear(x, 8, 8)
    alone, summed = norm(g, product), norm(g, g.node("Add", x, product))
    before, after, report = before_and_after(g, g.node("Add", g.linear(summed, 8, VOCAB), g.linear(alone, 8, VOCAB)))
    assert before == after
    assert residuals(after)["matmul"].count(True) == 1, "only the last product adds: the other of the two"
    assert report.refused == {"another kernel call reads the product without the residual": 1}


def test_a_product_that_adds_already_adds_nothing_else() -> None:
    """x + product goes into another sum, before a norm."""
    g = GraphMaker()
    x, y = g.input(), g.input()
    inner = g.node("Add", x, g.linear(x, 8, 8))
    before, after, report = before_and_after(g, g.linear(norm(g, g.node("Add", y, inner)), 8, VOCAB))
    assert before == after
    assert residuals(after) == {"matmul": [True, False], "rms_norm": [True]}
    assert report.refused == {"the product has a residual already": 1}


def test_a_sum_of_what_no_product_made_stays_with_the_norm() -> None:
    g = GraphMaker()
    x, y = g.input(), g.input()
    before, after, report = before_and_after(g, g.linear(norm(g, g.node("Add", x, y)), 8, VOCAB))
    assert before == after
    assert report.refused == {"what the norm reads comes from gather_rows": 1}


@pytest.mark.parametrize(("target", "runs"), [("cpu/avx2", True), ("ref", False), ("cuda/sm90", False)])
def test_it_runs_where_a_targets_products_add(target: str, runs: bool) -> None:
    assert (add_in_products in step_passes(find_target(target))) == runs
