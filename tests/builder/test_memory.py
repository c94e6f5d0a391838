"""The arena: nothing alive overlaps, bytes are used again, in place where it is allowed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.builder.memory import Use, Value, plan_arena
from ingot.dtypes import DType
from ingot.plan import Buffer, Rows

ROWS = {Rows.TOKENS: 10, Rows.LOGITS: 3}
Chain = tuple[list[Value], list[Use]]


def extent(buffer: Buffer) -> tuple[int, int]:
    return buffer.offset, buffer.offset + ROWS[buffer.rows] * buffer.cols * buffer.dtype.itemsize


def tokens(*cols: int) -> list[Value]:
    return [Value(rows=Rows.TOKENS, cols=each) for each in cols]


def test_a_chain_needs_two_places() -> None:
    uses = [Use(inputs=(), outputs=(0,)), *(Use(inputs=(i,), outputs=(i + 1,)) for i in range(5))]
    buffers, arena = plan_arena(tokens(*[16] * 6), uses, ROWS, results=[5])
    assert arena == 2 * 640
    assert len(set(buffers)) == 2
    assert {buffer.name for buffer in buffers} == {"tokens.16", "tokens.16.2"}


def test_in_place_takes_over_a_dying_input() -> None:
    uses = [
        Use(inputs=(), outputs=(0,)),
        Use(inputs=(0,), outputs=(1,)),
        Use(inputs=(1, 0), outputs=(2, 3), in_place=((1, 1),)),  # 3 = 1 + 0, over 0
        Use(inputs=(2, 3), outputs=(4,), in_place=((0, 1),)),
    ]
    buffers, arena = plan_arena(tokens(16, 16, 16, 16, 16), uses, ROWS, results=[4])
    assert buffers[0] == buffers[3] == buffers[4]
    assert arena == 3 * 640


def test_in_place_waits_for_the_last_reader() -> None:
    uses = [
        Use(inputs=(), outputs=(0,)),
        Use(inputs=(0,), outputs=(1,), in_place=((0, 0),)),
        Use(inputs=(0, 1), outputs=(2,)),
    ]
    buffers, _ = plan_arena(tokens(16, 16, 16), uses, ROWS, results=[2])
    assert buffers[0] != buffers[1]


@pytest.mark.parametrize("of_ranks", [False, True])
def test_sums_over_ranks_are_not_written_over_in_place(of_ranks: bool) -> None:
    uses = [Use(inputs=(), outputs=(0,), of_ranks=of_ranks), Use(inputs=(0,), outputs=(1,), in_place=((0, 0),))]
    buffers, _ = plan_arena(tokens(4, 4), uses, ROWS, [1])
    assert (buffers[0].offset != buffers[1].offset) is of_ranks


def test_in_place_needs_the_same_type() -> None:
    uses = [
        Use(inputs=(), outputs=(0,)),
        Use(inputs=(0,), outputs=(1,), in_place=((0, 0),)),
        Use(inputs=(1,), outputs=(2,)),
    ]
    wide, narrow = (Value(rows=Rows.TOKENS, cols=16, dtype=dtype) for dtype in (DType.F32, DType.BF16))
    buffers, arena = plan_arena([wide, narrow, wide], uses, ROWS, results=[2])
    assert [buffer.name for buffer in buffers] == ["tokens.16", "tokens.16.bf16", "tokens.16"]
    assert arena == 640 + 320


def test_in_place_needs_the_same_shape_and_a_single_use() -> None:
    uses = [Use(inputs=(), outputs=(0,)), Use(inputs=(0, 0), outputs=(1,), in_place=((0, 0),))]
    buffers, _ = plan_arena(tokens(16, 16), uses, ROWS, results=[1])
    assert buffers[0] != buffers[1]
    values = [*tokens(16), Value(rows=Rows.LOGITS, cols=16)]
    uses = [Use(inputs=(), outputs=(0,)), Use(inputs=(0,), outputs=(1,), in_place=((0, 0),))]
    buffers, _ = plan_arena(values, uses, ROWS, results=[1])
    assert extent(buffers[1])[0] >= extent(buffers[0])[1] or extent(buffers[0])[0] >= extent(buffers[1])[1]


def test_kept_inputs_stay_as_long_as_the_outputs() -> None:
    """1 = f(0), 2 = g(1), and g may make 1 again from 0."""
    for keeps, places in ((False, 2), (True, 3)):
        uses = [
            Use(inputs=(), outputs=(0,)),
            Use(inputs=(0,), outputs=(1,), keeps_inputs=keeps),
            Use(inputs=(1,), outputs=(2,)),
            Use(inputs=(2,), outputs=(3,)),
        ]
        buffers, arena = plan_arena(tokens(16, 16, 16, 16), uses, ROWS, results=[3])
        assert arena == places * 640
        assert (buffers[2] == buffers[0]) != keeps
        assert buffers[3] in buffers[:2]


def test_an_input_is_kept_through_a_chain_and_in_place() -> None:
    """1 = f(0) and 2 = f(1), which both keep: 0 stays for who reads 2. What is kept is not taken over."""
    uses = [
        Use(inputs=(), outputs=(0,)),
        Use(inputs=(0,), outputs=(1,), in_place=((0, 0),), keeps_inputs=True),
        Use(inputs=(1,), outputs=(2,), in_place=((0, 0),), keeps_inputs=True),
        Use(inputs=(2,), outputs=(3,)),
    ]
    buffers, arena = plan_arena(tokens(16, 16, 16, 16), uses, ROWS, results=[3])
    assert len(set(buffers)) == 4
    assert arena == 4 * 640


@st.composite
def programs(draw: st.DrawFn) -> Chain:
    """Random straight-line programs: every step reads earlier values and makes one or two."""
    values: list[Value] = []
    uses: list[Use] = []
    for _ in range(draw(st.integers(1, 12))):
        inputs = draw(st.lists(st.integers(0, len(values) - 1), max_size=3)) if values else []
        count = draw(st.integers(1, 2))
        made = range(len(values), len(values) + count)
        for _ in made:
            rows = draw(st.sampled_from([Rows.TOKENS, Rows.LOGITS]))
            dtype = draw(st.sampled_from([DType.F32, DType.BF16]))
            values.append(Value(rows=rows, cols=draw(st.sampled_from([1, 5, 16, 48])), dtype=dtype))
        pairs = st.tuples(st.integers(0, count - 1), st.integers(0, max(len(inputs) - 1, 0)))
        in_place = tuple(draw(st.lists(pairs, max_size=1))) if inputs else ()
        keeps = draw(st.booleans())
        uses.append(Use(inputs=tuple(inputs), outputs=tuple(made), in_place=in_place, keeps_inputs=keeps))
    return values, uses


def test_a_result_lives_on_after_the_last_step() -> None:
    """It is made first, and what comes later must not take its place."""
    uses = [Use(inputs=(), outputs=(0,)), Use(inputs=(), outputs=(1,)), Use(inputs=(1,), outputs=(2,))]
    buffers, arena = plan_arena(tokens(16, 16, 16), uses, ROWS, results=[0])
    assert arena == 3 * 640
    assert len(set(buffers)) == 3


@pytest.mark.slow
@settings(max_examples=80)
@given(programs())
def test_every_step_finds_its_inputs_unharmed(program: Chain) -> None:
    """Run the program on the arena with a distinct number per value: each must be there when it is read."""
    values, uses = program
    result = len(values) - 1
    makers = {index: use for use in uses for index in use.outputs if index is not None}
    buffers, size = plan_arena(values, uses, ROWS, results=[result])
    arena = np.zeros(size // 2, np.int64)
    for use in uses:
        for index in use.inputs:
            assert index is not None
            kept = makers[index].inputs if makers[index].keeps_inputs else ()
            for needed in (index, *kept):
                assert needed is not None
                begin, end = extent(buffers[needed])
                assert (arena[begin // 2 : end // 2] == needed).all()
        outputs = [index for index in use.outputs if index is not None]
        spans = [extent(buffers[index]) for index in outputs]
        assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(spans) for b in spans[:i])
        allowed = {(use.outputs[o], use.inputs[i]) for o, i in use.in_place}
        for index in outputs:
            for source in use.inputs:
                assert source is not None
                apart = extent(buffers[index])[1] <= extent(buffers[source])[0]
                apart |= extent(buffers[source])[1] <= extent(buffers[index])[0]
                assert apart or ((index, source) in allowed and buffers[index] == buffers[source])
            begin, end = extent(buffers[index])
            arena[begin // 2 : end // 2] = index
    begin, end = extent(buffers[result])
    assert (arena[begin // 2 : end // 2] == result).all()
    assert all(buffer.offset % 64 == 0 and extent(buffer)[1] <= size for buffer in buffers)
    assert len({buffer.name for buffer in buffers}) == len(set(buffers))
