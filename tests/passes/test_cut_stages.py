"""What a pipeline stage has of a program: neighbouring steps, and what travels between stages."""

from collections.abc import Sequence

import pytest

from ingot.builder.memory import Value
from ingot.builder.passes.cut_stages import CutStages, find_cuts
from ingot.builder.program import Draft, Program
from ingot.dtypes import DType
from ingot.errors import UsageError
from ingot.plan import CacheGroup, Rows
from ingot.plugins.registry import find_target
from tests.passes.test_split_sums import lower

COLS, ROTARY = 8, 4


def group(*layers: int) -> CacheGroup:
    return CacheGroup(layers=layers, kv_heads=1, head_dim=4, tokens_per_block=16, dtype=DType.F32)


def program(layers: Sequence[int]) -> Program:
    """embedding, a table of rotations, an attention of each layer's cache and a step behind it, logits."""
    steps = [
        Draft(name="table", op="rope_table", kernel="", inputs=("inv_freq", "positions"), outputs=(0,), attrs={}),
        Draft(name="embed", op="embedding", kernel="", inputs=("table", None, "input_ids"), outputs=(1,), attrs={}),
    ]
    values = [Value(rows=Rows.TOKENS, cols=ROTARY), Value(rows=Rows.TOKENS, cols=COLS)]
    x = 1
    for place, layer in enumerate(layers):
        for op, inputs, attrs in (
            ("paged_attention", (x, 0), {"layer": layer}),
            ("matmul", (x + 1, f"weight{place}"), {}),
        ):
            values.append(Value(rows=Rows.TOKENS, cols=COLS))
            x += 1
            steps.append(Draft(name=f"{op}{place}", op=op, kernel="", inputs=inputs, outputs=(x,), attrs=attrs))
    values.append(Value(rows=Rows.LOGITS, cols=11))
    steps.append(Draft(name="head", op="matmul", kernel="", inputs=(x, "weight0"), outputs=(x + 1,), attrs={}))
    return Program(steps=tuple(steps), values=tuple(values), logits=x + 1)


def stages(made: Program, cuts: tuple[int, ...]) -> list[tuple[CutStages, Program]]:
    found = []
    for stage in range(len(cuts) + 1):
        cut = CutStages(lowering=lower(), target=find_target("ref"), stage=stage, cuts=cuts)
        found.append((cut, cut(made)[0]))
    return found


def test_stages_pass_on_what_others_read() -> None:
    made = program((0, 1, 2))
    cuts = find_cuts(made, [], [group(0, 1, 2)], 16, 3)
    found = stages(made, cuts)
    names = [[step.name for step in each.steps] for _, each in found]
    assert names[0][0] == "table", "made anew where it is read, so not sent"
    assert [each[-1] for each in names] == ["stage0.send0", "stage1.send0", "head"]
    assert [each[:2] for each in names[1:]] == [["stage1.recv0", "table"], ["stage2.recv0", "table"]]
    assert [step for each in names for step in each if step.startswith("paged")] == [
        f"paged_attention{i}" for i in range(3)
    ]
    for cut, each in found:
        assert [step.attrs["layer"] for step in each.steps if "layer" in step.attrs] == [0]
        assert cut.caches([group(0, 1, 2)]) == (group(0),)
        written = [value for step in each.steps for value in step.outputs]
        assert sorted(value for value in written if value is not None) == list(range(len(each.values)))
    assert [each.logits is None for _, each in found] == [True, True, False]
    sent = found[0][1].steps[-1]
    assert (dict(sent.attrs), sent.outputs) == ({"stage": 0, "stages": 3, "message": 0}, ())
    got = found[1][1].steps[0]
    assert dict(got.attrs) == {"stage": 1, "stages": 3, "message": 0, "columns": COLS}


def test_what_a_later_stage_reads_travels_through_those_between() -> None:
    made = program((0, 1, 2))
    far = Draft(
        name="far", op="add", kernel="", inputs=(made.steps[-1].inputs[0], 1), outputs=(len(made.values),), attrs={}
    )
    head = Draft(name="head", op="matmul", kernel="", inputs=(len(made.values), "w"), outputs=(made.logits,), attrs={})
    values = (*made.values, Value(rows=Rows.TOKENS, cols=COLS))
    made = Program(steps=(*made.steps[:-1], far, head), values=values, logits=made.logits)
    found = stages(made, find_cuts(made, [], [group(0, 1, 2)], 16, 3))
    assert [sum(step.op == "recv" for step in each.steps) for _, each in found] == [0, 2, 2]
    assert [sum(step.op == "send" for step in each.steps) for _, each in found] == [2, 2, 0]


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    made, caches = program((0, 1, 2, 3)), [group(0, 1, 2, 3)]
    (even,) = find_cuts(made, [], caches, 16, 2)
    assert [step.name for step in made.steps[:even]].count("paged_attention2") == 0
    assert "paged_attention1" in [step.name for step in made.steps[:even]]


def test_layers_that_share_a_cache_stay_together() -> None:
    made = program((0, 1, 1, 1))
    (cut,) = find_cuts(made, [], [group(0, 1)], 16, 2)
    assert [step.attrs["layer"] for step in made.steps[cut:] if "layer" in step.attrs] == [1, 1, 1]
    with pytest.raises(UsageError, match=r"--pp_size 3 is too large(.|\n)*--pp_size 2: each stage"):
        find_cuts(made, [], [group(0, 1)], 16, 3)


def test_each_stage_needs_a_layer_of_every_group() -> None:
    made = program((0, 1, 2, 3))
    with pytest.raises(UsageError, match=r"--pp_size 2 is too large(.|\n)*2 \+ 2 layers"):
        find_cuts(made, [], [group(0, 1), group(2, 3)], 16, 2)
    (found,) = find_cuts(made, [], [group(0, 2), group(1, 3)], 16, 2)
    assert [step.attrs["layer"] for step in made.steps[:found] if "layer" in step.attrs] == [0, 1]
