"""A step's integers: those of a step that goes on are written over those of the step before, and checked likewise."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingot.errors import RequestError
from ingot.plugins.cuda.shapes import Tiles
from ingot.plugins.cuda.step_tables import StepTables, TableLayout, check_batch, check_next
from ingot.step_io import LAST_DRAWN, StepBatch, goes_on
from tests.plugins.cpu.one_step import batch_of

SIZE, WIDTH, BLOCKS = 16, 4, 40
LIMITS: Any = SimpleNamespace(max_seq_len=SIZE * WIDTH, max_num_tokens=64, max_logit_rows=8, max_batch_size=8)
KV, STATES = (SimpleNamespace(window=window, state=state) for window, state in ((0, ()), (2, (64,))))
PLAN: Any = SimpleNamespace(
    limits=LIMITS, tokens_per_block=SIZE, caches=(KV,), max_positions=SIZE * WIDTH, vocab_size=50
)


def first_step(past: list[int]) -> StepBatch:
    count = len(past)
    tables = [[WIDTH * row + place for place in range(1 + length // SIZE)] for row, length in enumerate(past)]
    ids = np.full(count, LAST_DRAWN, np.int32)
    return batch_of([(length, 1) for length in past], tables, range(count), draws=range(count), ids=ids)


def next_step(before: StepBatch, **changes: Any) -> StepBatch:
    return dataclasses.replace(before, past_lengths=before.past_lengths + 1, **changes)


def filled(tables: StepTables, batch: StepBatch, padded: int | None) -> tuple[Any, list[int]]:
    counts, integers = tables.fill(batch, padded)
    return counts, integers.tolist()


@pytest.mark.parametrize("tiles", [Tiles(decode=4, prefill=16), Tiles(decode=0, prefill=2)])
def test_a_step_that_goes_on_is_filled_as_any_other(monkeypatch: pytest.MonkeyPatch, tiles: Tiles) -> None:
    layout, items, cut = TableLayout.of(PLAN, tiles), StepTables._items, list[StepBatch]()

    def counted(self: StepTables, batch: StepBatch, new: Any) -> Any:
        cut.append(batch)
        return items(self, batch, new)

    monkeypatch.setattr(StepTables, "_items", counted)

    def tables() -> StepTables:
        return StepTables(layout, np.zeros(4 * layout.total, np.uint8), tiles, LIMITS, (BLOCKS,))

    kept, step = tables(), first_step([30, 3, 14])
    for number in range(6):
        given = dataclasses.replace(step, ids=np.arange(number, number + 3, dtype=np.int32))
        padded = 4 if number < 4 else 8
        assert filled(kept, given, padded) == filled(tables(), given, padded), number
        wider = np.array([[[0, 1, 30, -1], [4, -1, -1, -1], [8, 9, -1, -1]]], np.int32)
        step = next_step(step, **({"block_tables": wider} if number == 1 else {}))
    assert len(cut) == 2 + 6, "once for each size, and in fresh memory each time"


def test_what_changes_is_checked() -> None:
    step = first_step([14, 3])
    check_batch(dataclasses.replace(step, ids=np.zeros(2, np.int32)), PLAN, (BLOCKS,))
    following = next_step(step)
    assert goes_on(following, step)
    assert not goes_on(dataclasses.replace(following, slots=following.slots.copy()), step)
    check_next(following, step, PLAN, (BLOCKS,))
    beyond = next_step(following)
    with pytest.raises(RequestError, match="block tables"):
        check_next(beyond, following, PLAN, (BLOCKS,))
    for block in (-1, BLOCKS):
        wrong = np.array([[[0, block], [4, 5]]], np.int32)
        with pytest.raises(RequestError, match="a block of a table"):
            check_next(next_step(following, block_tables=wrong), following, PLAN, (BLOCKS,))
    right = next_step(following, block_tables=np.array([[[0, 7], [4, 5]]], np.int32))
    check_next(right, following, PLAN, (BLOCKS,))
    later, lost = right, np.array([[[-1, 7], [4, 5]]], np.int32)
    with pytest.raises(RequestError, match="a block of a table"):
        check_next(next_step(later, block_tables=lost), later, PLAN, (BLOCKS,))
    while int(later.past_lengths[0]) < 2 * SIZE - 1:
        before, later = later, next_step(later)
        check_next(later, before, PLAN, (BLOCKS,))
    with pytest.raises(RequestError, match="block tables"):
        check_next(next_step(later), later, PLAN, (BLOCKS,))


def with_states(step: StepBatch, slots: list[list[int]]) -> StepBatch:
    """The step with a second group, whose slots these are."""
    return dataclasses.replace(step, block_tables=np.array([step.block_tables[0].tolist(), slots], np.int32))


def test_slots_of_states_are_sent_and_checked() -> None:
    """One that is left behind may be gone; a sequence needs that which it starts from, and that which it leaves."""
    plan: Any = SimpleNamespace(**{**vars(PLAN), "caches": (KV, STATES)})
    blocks = (BLOCKS, 3)
    first = first_step([16, 20])
    step = with_states(dataclasses.replace(first, ids=np.zeros(2, np.int32)), [[0, 2], [-1, 1]])
    check_batch(step, plan, blocks)
    for slots in ([[-1, 0], [-1, 1]], [[3, 2], [-1, 1]], [[0, -1], [-1, 1]]):
        with pytest.raises(RequestError, match="a slot of a state is out of range"):
            check_batch(with_states(step, slots), plan, blocks)

    following = next_step(step)
    check_next(following, step, plan, blocks)
    moved = with_states(next_step(following), [[-1, 2], [-1, 1]])
    check_next(moved, following, plan, blocks)
    with pytest.raises(RequestError, match="a slot of a state is out of range"):
        check_next(with_states(next_step(moved), [[-1, -1], [-1, 1]]), moved, plan, blocks)

    tiles = Tiles(decode=4, prefill=16)
    layout = TableLayout.of(plan, tiles)
    tables = StepTables(layout, np.zeros(4 * layout.total, np.uint8), tiles, LIMITS, (BLOCKS, -1))
    begin = layout.offsets["runs"]
    for batch, past in ((step, [16, 20]), (following, [17, 21])):
        _, integers = tables.fill(batch, 3)
        runs = [[0, 0, 1, past[0]], [1, 1, 1, past[1]], [2, 2, 1, 0]]
        assert integers[begin : begin + 12].reshape(3, 4).tolist() == runs
        idle = integers[layout.offsets["tables"] + 2 * layout.width :]
        assert idle.reshape(2, -1)[:, 0].tolist() == [BLOCKS, -1], "idle rows leave no state"
