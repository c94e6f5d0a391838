"""Products of heads and of activations become parts and a tree of sums; all others stay whole."""

import functools
import re
from collections.abc import Callable

import pytest

from ingot.builder.lower import Lowering
from ingot.builder.names import name_nodes
from ingot.builder.passes.split_sums import SplitSums
from ingot.builder.pipeline import run_passes, structure_passes, target_passes
from ingot.builder.precision import ProductChoice, products_of
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType, Precision
from ingot.errors import BuildError, UsageError
from ingot.plugins.registry import find_target
from tests.passes.graphs import VOCAB, GraphMaker

REF = find_target("ref")
HIDDEN, WIDE = 8, 64


def lower(
    dtype: DType = DType.F32, group: int = 0, *, wide: int = WIDE, relu: bool = True, bias: bool = False
) -> Lowering:
    """x + down(relu(up(x))), then logits."""
    g = GraphMaker()
    x = g.input()
    up = g.linear(x, HIDDEN, wide)
    branch = g.linear(g.node("Relu", up) if relu else up, wide, HIDDEN, bias=bias)
    return lowered(g, g.linear(g.node("Add", x, branch), HIDDEN, VOCAB), dtype, group)


def lowered(g: GraphMaker, logits: str, dtype: DType = DType.F32, group: int = 0) -> Lowering:
    """A graph, as an engine of `ref` has it before its sums are made in parts."""
    graph = g.finish(logits)
    run_passes(graph, structure_passes())
    name_nodes(graph)
    choice = ProductChoice(precision=Precision(dtype=dtype, group=group), activations="f32")
    products = {node.name: choice for node in products_of(graph)}
    run_passes(graph, target_passes(REF, products=products, tables=DType.F32, kv=DType.F32))
    return Lowering(graph)


def split(lowering: Lowering, parts: int, target: str = "ref") -> Program:
    program, _ = SplitSums(lowering=lowering, target=find_target(target), parts=parts)(lowering.program)
    return program


def role(step: Draft) -> str:
    return re.sub(r".*/(down)?", "", step.name)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_tree_of_neighbours(parts: int) -> None:
    lowering = lower()
    before = lowering.program
    program = split(lowering, parts)
    assert (before.sum_parts, program.sum_parts) == (1, parts)
    assert [step.name for step in program.steps if not step.name.startswith("layers.0/down.")] == [
        step.name for step in before.steps if not step.name.endswith("/down")
    ]
    steps = {role(step): step for step in program.steps}
    whole = next(step for step in before.steps if step.name.endswith("/down"))
    for part in range(parts):
        taken, product = steps[f".columns{part}"], steps[f".part{part}"]
        count = WIDE // parts
        assert (taken.inputs, dict(taken.attrs)) == (
            whole.inputs[:1],
            {"of": WIDE, "first": part * count, "count": count},
        )
        assert product.inputs[0] == taken.outputs[0]
        assert product.inputs[3] == (steps[f".part{part - 1}"].outputs[0] if part % 2 else None)
        assert (product.kernel, product.attrs) == (whole.kernel, whole.attrs)
    sums = [step for step in program.steps if ".sum" in step.name]
    pairs = [steps[f".part{part}"].outputs[0] for part in range(1, parts, 2)]
    if parts == 4:
        assert sums[0].inputs == tuple(pairs)
        pairs = [sums[0].outputs[0]]
    assert sums[-1].inputs == (*pairs, whole.inputs[3]), "the residual comes last"
    assert sums[-1].outputs == whole.outputs
    assert len(sums) == parts // 2


def test_the_parts_of_a_weight_are_its_columns_and_the_whole_is_gone() -> None:
    lowering = lower()
    whole = lowering.use("layers.0/down.weight")
    split(lowering, 4)
    uses = {use.name: use for use in lowering.uses}
    assert whole.name not in uses
    found = [uses[f"layers.0/down.part{part}.weight"] for part in range(4)]
    assert [use.shape for use in found] == [(HIDDEN, WIDE // 4)] * 4
    assert [[int(each.values[0]) for each in use.tensor.inputs[0].inputs[1:]] for use in found] == [
        [16 * part, 16 * part + 16, 1] for part in range(4)
    ]


def test_the_first_parts_have_more_groups() -> None:
    """A group stays whole, and the last one may be shorter."""
    program = split(lower(DType.W4, 32, wide=150), 4)
    taken = [step.attrs for step in program.steps if step.op == "take_columns"]
    assert [(each["first"], each["count"]) for each in taken] == [(0, 64), (64, 32), (96, 32), (128, 22)]


def test_the_first_part_adds_the_bias() -> None:
    program = split(lower(bias=True), 4)
    biases = [step.inputs[2] for step in program.steps if ".part" in step.name]
    assert biases == ["layers.0/down.bias", None, None, None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_product_behind_a_norm_inside_an_mlp_is_cut_by_rows(ranks: int) -> None:
    """Every rank norms all columns, and computes some rows of the product."""
    g = GraphMaker()
    x = g.input()
    inner = g.node("Relu", g.linear(x, HIDDEN, WIDE))
    normed = g.node("RMSNormalization", inner, g.weight(WIDE), axis=-1, epsilon=0.25)
    branch = g.linear(normed, WIDE, HIDDEN)
    lowering = lowered(g, g.linear(g.node("Add", x, branch), HIDDEN, VOCAB))
    sums = SplitSums(lowering=lowering, target=REF, parts=2, rank=ranks - 1, ranks=ranks)
    program, report = sums(lowering.program)
    assert (report.fired, report.refused) == (1, {})
    steps = {step.op: step for step in program.steps if step.op != "matmul"}
    down = next(step for step in program.steps if step.name.endswith("/down"))
    assert down.inputs[0] == steps["rms_norm"].outputs[0]
    assert lowering.use(str(down.inputs[1])).shape == (HIDDEN // ranks, WIDE)
    assert not any(".part" in step.name for step in program.steps)
    gathered = [step.attrs["columns"] for step in program.steps if step.op == "all_gather"]
    assert gathered == ([WIDE, HIDDEN] if ranks == 2 else [])
    assert list(sums.shares.values()) == ([(WIDE // 2, WIDE)] if ranks == 2 else [])


@pytest.mark.parametrize(
    ("make", "parts", "words"),
    [
        (functools.partial(lower, relu=False), 2, "no matmul whose sum can be split"),
        (lower, 128, r"--sum_parts 128 is too large(.|\n)*at least 128 x 1 columns(.|\n)*got: 64 columns"),
        (
            functools.partial(lower, DType.W4, 32),
            4,
            r"at least 4 x 32 columns(.|\n)*got: 64 columns(.|\n)*smaller group",
        ),
    ],
)
def test_refusals(make: Callable[[], Lowering], parts: int, words: str) -> None:
    with pytest.raises((BuildError, UsageError), match=words):
        split(make(), parts)


def test_a_target_without_kernels_is_refused() -> None:
    with pytest.raises(BuildError, match=r"not supported on tensorrt/sm80(.|\n)*cpu or cuda target"):
        split(lower(), 2, "tensorrt/sm80")
