"""Which products get compressed weights."""

import dataclasses
from collections.abc import Sequence

import pytest

from ingot.builder.graph import Graph
from ingot.builder.lower import Lowering
from ingot.builder.names import name_nodes
from ingot.builder.pack import WeightUse
from ingot.builder.passes import fold_constants
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.compress_weights import CompressWeights, compressing_kernels
from ingot.builder.pipeline import run_passes, structure_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.builder.program import Program
from ingot.dtypes import DType, Precision
from ingot.plugins.registry import find_op, find_target
from tests.passes.graphs import VOCAB, GraphMaker
from tests.passes.test_insert_moe import experts

REF = find_target("ref")
KERNELS = {f"{op}.bf16.ref": f"{op}.bf16c.ref" for op in ("matmul", "moe_gate_up", "moe_down")}


def lower(dtype: DType = DType.BF16) -> Lowering:
    """Two products, of which the second makes the logits, as a target that packs floats has them."""
    g = GraphMaker()
    return lowered(g.finish(g.linear(g.linear(g.input(), 8, 24), 24, VOCAB)), dtype)


def lowered(graph: Graph, dtype: DType) -> Lowering:
    # weights in the graph itself would be folded, and those of experts be transposed then
    run_passes(graph, [each for each in structure_passes() if each is not fold_constants.PASS])
    name_nodes(graph)
    choice = ProductChoice(precision=Precision(dtype=dtype), activations="bf16")
    products = {node.name: choice for node in products_of(graph)}
    run_passes(graph, target_passes(REF, products=products, tables=dtype, kv=DType.F32))
    return Lowering(graph, panels=True)


def compressed(lowering: Lowering, unfit: Sequence[int] = ()) -> tuple[Program, PassReport]:
    """unfit: numbers of weights that have too many exponents."""

    def fitting(uses: Sequence[WeightUse]) -> set[str]:
        return {use.name for number, use in enumerate(uses) if number not in unfit}

    return CompressWeights(lowering=lowering, kernels=KERNELS, fitting=fitting)(lowering.program)


def stored(lowering: Lowering, program: Program) -> list[tuple[str, str]]:
    """Kernel and layout of each product."""
    packed = [(step, find_op(step.op).packed) for step in program.steps]
    return [(step.kernel, lowering.use(str(step.inputs[at])).layout) for step, at in packed if at is not None]


def test_products_of_bf16_take_their_weights_in_12_bits() -> None:
    lowering = lower()
    before = len(lowering.uses)
    program, report = compressed(lowering)
    assert stored(lowering, program) == [("matmul.bf16c.ref", "panel16.bf16c")] * 2
    assert (report.fired, report.refused) == (2, {})
    assert len(lowering.uses) == before


def test_a_weight_that_does_not_fit_stays_as_it_is() -> None:
    lowering = lower()
    program, report = compressed(lowering, unfit=[1])
    assert stored(lowering, program) == [("matmul.bf16c.ref", "panel16.bf16c"), ("matmul.bf16.ref", "panel16.bf16")]
    assert (report.fired, report.refused) == (1, {"a weight has too many different exponents": 1})


@pytest.mark.parametrize("unfit", [[], [2]])
def test_experts_of_bf16_take_their_weights_in_12_bits(unfit: list[int]) -> None:
    """All of them, or all but a stack that does not fit."""
    lowering = lowered(experts(head=True), DType.BF16)
    program, report = compressed(lowering, unfit)
    down = ("moe_down.bf16.ref", "panel16.bf16") if unfit else ("moe_down.bf16c.ref", "panel16.bf16c")
    matmul, gate_up = ("matmul.bf16c.ref", "panel16.bf16c"), ("moe_gate_up.bf16c.ref", "panel16.bf16c.gated")
    assert stored(lowering, program) == [matmul, gate_up, down, matmul]  # the router comes first, lm_head last
    assert (report.fired, sum(report.refused.values())) == (4 - len(unfit), len(unfit))


def test_other_weights_stay_as_they_are() -> None:
    lowering = lower(DType.F32)
    program, report = compressed(lowering)
    assert program == lowering.program
    assert (report.fired, report.refused) == (0, {})


def test_a_weight_that_another_kernel_call_reads_stays_as_it_is() -> None:
    lowering = lower()
    first = next(step for step in lowering.program.steps if step.op == "matmul")
    other = dataclasses.replace(first, name="other", kernel="matmul.bf16.other", outputs=(None,))
    program = dataclasses.replace(lowering.program, steps=(other, *lowering.program.steps))
    changed, report = CompressWeights(
        lowering=lowering, kernels=KERNELS, fitting=lambda uses: {use.name for use in uses}
    )(program)
    assert report.fired == 1
    assert first in changed.steps


@pytest.mark.native
def test_targets_whose_best_kernel_of_bf16_takes_12_bits() -> None:
    ops = "matmul", "moe_gate_up", "moe_down"
    expected = {f"{op}.bf16.avx512bf16": f"{op}.bf16c.avx512bf16" for op in ops}
    assert compressing_kernels(find_target("cpu/avx512bf16")) == expected
    for name in ("cpu/avx2", "cpu/avx512", "cpu/amx", "ref", "cuda/sm90"):
        assert compressing_kernels(find_target(name)) == {}
