"""What a rank has of a program: columns of its products, and where it meets the others."""

import pytest

from ingot.builder.lower import Lowering
from ingot.builder.passes.split_ranks import SplitRanks
from ingot.builder.passes.split_sums import SplitSums
from ingot.builder.program import Program
from ingot.errors import BuildError
from ingot.plan import Attr
from ingot.plugins.registry import find_target
from tests.passes.graphs import VOCAB, GraphMaker
from tests.passes.test_split_sums import HIDDEN, WIDE, lower, lowered

RANKS = 2


def split(lowering: Lowering, rank: int, parts: int = 4) -> Program:
    sums = SplitSums(lowering=lowering, target=find_target("ref"), parts=parts, rank=rank, ranks=RANKS)
    program, _ = sums(lowering.program)
    return SplitRanks(sums=sums)(program)[0]


def shapes(lowering: Lowering) -> dict[str, tuple[int, ...]]:
    return {use.name: use.shape for use in lowering.uses}


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_has_its_columns_and_its_logits(rank: int) -> None:
    lowering = lower(bias=True)
    program = split(lowering, rank)
    found = shapes(lowering)
    assert found["layers.0/up.weight"] == (WIDE // RANKS, HIDDEN)
    own = [f"layers.0/down.part{part}.weight" for part in range(2 * rank, 2 * rank + 2)]
    assert [name for name in found if ".part" in name] == own
    assert ("layers.0/down.bias" in found) == (rank == 0)
    vocab = (VOCAB // RANKS, VOCAB - VOCAB // RANKS)[rank]
    assert found["lm_head.weight"] == (vocab, HIDDEN)
    values = {step.name: program.values[step.outputs[0]] for step in program.steps if step.outputs[0] is not None}
    assert values["layers.0/up"].cols == WIDE // RANKS
    assert values["lm_head"].cols == vocab
    assert values["lm_head.all_gather"].cols == VOCAB
    taken: list[dict[str, Attr]] = [dict(step.attrs) for step in program.steps if step.op == "take_columns"]
    assert taken == [{"of": 32, "first": first, "count": 16} for first in (0, 16)]


def test_the_ranks_meet_after_their_own_sums() -> None:
    program = split(lower(), 0)
    ops = [step.op for step in program.steps if step.name.startswith("layers.0/down")]
    assert ops == ["take_columns", "matmul", "take_columns", "matmul", "all_reduce", "add"]
    assert program.steps[-1].outputs[0] == program.logits


def test_a_part_for_each_rank_needs_no_columns_taken() -> None:
    program = split(lower(), 1, parts=2)
    ops = [step.op for step in program.steps if step.name.startswith("layers.0/down")]
    assert ops == ["matmul", "all_reduce", "add"]


def test_what_another_step_reads_is_not_divided() -> None:
    g = GraphMaker()
    x = g.input()
    wide = g.node("Relu", g.linear(x, HIDDEN, WIDE))
    branch = g.node("Add", g.linear(wide, WIDE, HIDDEN), g.linear(wide, WIDE, HIDDEN))
    lowering = lowered(g, g.linear(g.node("Add", x, branch), HIDDEN, VOCAB))
    with pytest.raises(BuildError, match="another kernel call reads what is added up"):
        split(lowering, 0)


def with_weight(g: GraphMaker, x: str, weight: str) -> str:
    return g.node("MatMul", x, g.node("Transpose", weight, perm=[1, 0]))


def test_layers_may_share_a_weight() -> None:
    """Each of them has the same rows of it, once."""
    g = GraphMaker()
    x, weight = g.input(), g.weight(WIDE, HIDDEN)
    for _ in range(2):
        x = g.node("Add", x, g.linear(g.node("Relu", with_weight(g, x, weight)), WIDE, HIDDEN))
    lowering = lowered(g, g.linear(x, HIDDEN, VOCAB))
    program = split(lowering, 1)
    read = [step.inputs[1] for step in program.steps if step.op == "matmul" and step.attrs["activation"] == "relu"]
    assert len(read) == 2
    assert read[0] == read[1]
    assert shapes(lowering)[str(read[0])] == (WIDE // RANKS, HIDDEN)


def test_a_weight_that_another_step_needs_whole_is_not_divided() -> None:
    g = GraphMaker()
    x, weight = g.input(), g.weight(WIDE, HIDDEN)
    whole = g.linear(with_weight(g, x, weight), WIDE, HIDDEN)
    divided = g.linear(g.node("Relu", with_weight(g, x, weight)), WIDE, HIDDEN)
    lowering = lowered(g, g.linear(g.node("Add", whole, divided), HIDDEN, VOCAB))
    with pytest.raises(BuildError, match="is also another kernel call's, which needs all of it"):
        split(lowering, 0)


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_cannot_be_divided_is_computed_whole(rank: int) -> None:
    """A rank takes its columns of that, and divides what goes with it."""
    g = GraphMaker()
    x = g.input()
    both = g.node("Add", g.linear(x, HIDDEN, WIDE), g.linear(x, HIDDEN, WIDE))
    gated = g.node("Mul", g.node("Relu", g.linear(x, HIDDEN, WIDE)), both)
    lowering = lowered(g, g.linear(g.node("Add", x, g.linear(gated, WIDE, HIDDEN)), HIDDEN, VOCAB))
    program = split(lowering, rank, parts=2)
    steps = {step.op: step for step in program.steps}
    step = steps["activation"]
    gate, taken = step.inputs
    assert isinstance(gate, int)
    assert isinstance(taken, int)
    assert program.values[gate].cols == program.values[taken].cols == WIDE // RANKS
    assert dict(steps["take_columns"].attrs) == {"of": WIDE, "first": rank * WIDE // RANKS, "count": WIDE // RANKS}
    assert steps["take_columns"].outputs == (taken,)
    order = [each.op for each in program.steps]
    assert order.index("take_columns") == order.index("activation") - 1
    assert [shape for name, shape in shapes(lowering).items() if shape[1:] == (HIDDEN,)].count((WIDE, HIDDEN)) == 2
