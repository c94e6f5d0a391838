"""A step's integers as the kernels read them, in one stretch of memory that is sent in one copy.

    ids, positions, sequences                                   [tokens]
    rows                                                        [logit rows]
    decode, prefill                                             [items][4] {sequence, first token, tokens, position}
    runs                                                        [sequences][4] likewise, where layers keep states
    counts                                                      {tokens, logit rows, items of prefill}
    tables                                                      [sequences][cache groups][width / cache groups]

The tables come last, since only their beginning is sent.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.errors import RequestError
from ingot.plan import Limits, Plan
from ingot.plugins.cuda.shapes import Tiles
from ingot.step_inputs import step_arrays
from ingot.step_io import Int32, StepBatch

ITEM = 4  # integers of an item
_ALIGNMENT = 16  # integers: 64 bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableLayout:
    """Where each table begins, in integers; the capacity of all; `width` of a sequence's row of block tables, which are
    those of `groups` cache groups."""

    offsets: dict[str, int]
    sizes: dict[str, int]
    total: int
    width: int
    groups: int

    @classmethod
    def of(cls, plan: Plan, tiles: Tiles) -> "TableLayout":
        """Room for every step within the plan's limits."""
        limits, groups = plan.limits, len(plan.caches)
        width = groups * -(-limits.max_seq_len // plan.tokens_per_block)
        sizes = {
            "ids": limits.max_num_tokens,
            "positions": limits.max_num_tokens,
            "sequences": limits.max_num_tokens,
            "rows": limits.max_logit_rows,
            "decode": ITEM * limits.max_batch_size,
            "prefill": ITEM * (limits.max_num_tokens // tiles.prefill + limits.max_batch_size),
            **({"runs": ITEM * limits.max_batch_size} if any(each.state for each in plan.caches) else {}),
            "counts": 3,
            "tables": limits.max_batch_size * width,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(offsets=offsets, sizes=sizes, total=end, width=width, groups=groups)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What grids depend on. longest: tokens that the longest decode item sees, or may see at most."""

    tokens: int
    logit_rows: int
    sequences: int
    decode: int
    prefill: int
    longest: int


def check_batch(batch: StepBatch, plan: Plan, num_blocks: tuple[int, ...]) -> None:
    """Raises RequestError for a batch that breaks the contract: kernels check nothing."""
    if (problem := _problem(batch, plan, num_blocks)) is not None:
        raise RequestError(
            "a step has data that the engine cannot run",
            got=problem,
            hint="this is a bug of ingot, or of a program that calls Session itself: report it with --traceback",
        )


def _problem(batch: StepBatch, plan: Plan, num_blocks: tuple[int, ...]) -> str | None:
    limits, starts, past = plan.limits, batch.query_starts, batch.past_lengths
    tokens, sequences, wanted = len(batch.ids), len(past), len(batch.logit_rows)
    sizes, most = (tokens, sequences, wanted), (limits.max_num_tokens, limits.max_batch_size, limits.max_logit_rows)
    if tokens < 1 or any(size > limit for size, limit in zip(sizes, most, strict=True)):
        return f"{tokens} tokens of {sequences} sequences with {wanted} wanted rows are beyond the engine's limits"
    new = np.diff(starts)
    if len(starts) != sequences + 1 or starts[0] != 0 or starts[-1] != tokens or (new < 1).any():
        return f"query_starts {starts.tolist()} do not cut {tokens} tokens into {sequences} sequences"
    totals = past + new
    if (past < 0).any() or (totals > min(plan.max_positions, limits.max_seq_len)).any():
        return f"a sequence would reach {int(totals.max())} tokens"
    ids = np.maximum(batch.ids, 0)  # what is below stands for tokens that the device knows
    if not within(ids, plan.vocab_size) or not within(batch.logit_rows, tokens):
        return "a token id or a wanted row is out of range"
    if not within(batch.draws, wanted) or (batch.known is not None and not within(batch.known.row, wanted)):
        return "a draw is from a row that the step does not have"
    tables, used = batch.block_tables, -(-totals // plan.tokens_per_block)
    if tables.shape[:2] != (len(plan.caches), sequences) or tables.shape[2] < used.max(initial=0):
        return f"block tables {tables.shape} are too small for {int(totals.max())} tokens"
    places = np.arange(tables.shape[2])[None, :]
    for group, table, count in zip(plan.caches, tables, num_blocks, strict=True):
        if group.state:
            if not _slots_right(table, past, totals, plan.tokens_per_block, count):
                return "a slot of a state is out of range"
            continue
        unseen = np.maximum(past + 1 - group.window, 0) // plan.tokens_per_block if group.window else past * 0
        if not within(table[(places >= unseen[:, None]) & (places < used[:, None])], count):
            return "a block of a table is out of range"
    return None


def _slots_right(table: Int32, past: Int32, totals: Int32, size: int, count: int) -> bool:
    """Whether sequences have slots for the states that they start from and leave; in between there may be none."""
    rows, begin, end = np.arange(len(past)), np.maximum(past - 1, 0) // size, (totals - 1) // size
    places = np.arange(table.shape[1])[None, :]
    between = table[(places >= begin[:, None]) & (places <= end[:, None])]
    begun = past > 0
    needed = np.concatenate([table[rows[begun], begin[begun]], table[rows, end]])
    return within(needed, count) and within(np.maximum(between, 0), count)


def check_next(batch: StepBatch, before: StepBatch, plan: Plan, num_blocks: tuple[int, ...]) -> None:
    """`check_batch` of a step that goes on (step_io.goes_on) where a step was right: looks at what has changed."""
    past, tables, size = batch.past_lengths, batch.block_tables, plan.tokens_per_block
    if tables.shape == before.block_tables.shape and len(past) == len(before.past_lengths):
        longest = int(past.max()) + 1
        fits = longest <= min(plan.max_positions, plan.limits.max_seq_len) and longest <= tables.shape[2] * size
        if fits and (past == before.past_lengths + 1).all() and _blocks_right(batch, before, plan, num_blocks):
            return
    check_batch(batch, plan, num_blocks)


def _blocks_right(batch: StepBatch, before: StepBatch, plan: Plan, num_blocks: tuple[int, ...]) -> bool:
    """Whether all blocks are there that are new, or begin to be used, and the slots of states."""
    tables, then, past, size = batch.block_tables, before.block_tables, batch.past_lengths, plan.tokens_per_block
    rows = batch.query_starts[:-1]
    for group, count in enumerate(num_blocks):
        table, holes = tables[group], bool(plan.caches[group].state)
        if tables is not then:
            changed = table[table != then[group]]
            if not within(np.maximum(changed, 0) if holes else changed, count):
                return False
        if not within(table[rows, past // size], count):
            return False
        if holes and not within(table[rows, (past - 1) // size], count):
            return False
    return True


def within(values: Int32, end: int) -> bool:
    """Whether all are from 0 to end - 1."""
    return not values.size or bool(values.min() >= 0 and values.max() < end)


def idle_batch() -> StepBatch:
    """A step of no sequences: filled up, it has idle rows alone."""
    none = np.zeros(0, np.int32)
    return StepBatch(
        ids=none,
        query_starts=np.zeros(1, np.int32),
        past_lengths=none,
        block_tables=np.zeros((1, 0, 0), np.int32),
        logit_rows=none,
        slots=none,
        draws=none,
    )


class StepTables:
    """Fills the tables in pinned memory."""

    def __init__(
        self,
        layout: TableLayout,
        memory: npt.NDArray[np.uint8],
        tiles: Tiles,
        limits: Limits,
        spare_blocks: tuple[int, ...],
    ) -> None:
        """memory: layout.total integers. spare_blocks: which idle rows write to, of each cache group."""
        self._layout, self._tiles, self._limits, self._spare_blocks = layout, tiles, limits, spare_blocks
        self._memory = memory[: 4 * layout.total].view(np.int32)
        self._filled: tuple[StepBatch, int | None, Counts, int] | None = None  # what is in it

    def fill(self, batch: StepBatch, padded: int | None = None) -> tuple[Counts, Int32]:
        """(counts, the integers to send). padded: a decode step is filled up to this many sequences with idle rows.

        The counts of a padded step are those of every step that is filled up to as many: one graph serves them all.
        """
        if padded is not None and (known := self._fill_again(batch, padded)) is not None:
            return known
        new, past = np.diff(batch.query_starts), batch.past_lengths
        tokens, sequences = len(batch.ids), len(past)
        given = step_arrays(batch)
        extra = range(sequences, padded or sequences)
        decode, prefill = self._items(batch, new)
        alike = np.array([(index, index, 1, 0) for index in extra], np.int32).reshape(-1, ITEM)
        if self._tiles.decode:  # items of one token, as those of the step itself
            decode = np.concatenate([decode, alike])
        else:
            prefill = np.concatenate([prefill, alike])
        idle: Int32 = np.zeros(len(extra), np.int32)
        self._put("ids", np.concatenate([given["input_ids"], idle]))
        self._put("positions", np.concatenate([given["positions"], idle]))
        self._put("sequences", np.concatenate([given["token_sequences"], np.asarray(extra, np.int32)]))
        self._put("rows", np.concatenate([given["logit_rows"], np.asarray(extra, np.int32)]))
        self._put("decode", decode.reshape(-1))
        self._put("prefill", prefill.reshape(-1))
        if "runs" in self._layout.offsets:
            runs = np.stack((np.arange(sequences), batch.query_starts[:-1], new, past), axis=1).astype(np.int32)
            idle_runs = np.array([(row, tokens + row - sequences, 1, 0) for row in extra], np.int32).reshape(-1, ITEM)
            self._put("runs", np.concatenate([runs, idle_runs]).reshape(-1))
        end = self._put_tables(given["block_tables"], len(extra))
        longest = int((decode[:, 2] + decode[:, 3]).max(initial=0))
        counts = Counts(
            tokens=tokens + len(extra),
            logit_rows=len(batch.logit_rows) + len(extra),
            sequences=sequences + len(extra),
            decode=len(decode),
            prefill=len(prefill),
            longest=longest if padded is None else self._limits.max_seq_len,
        )
        self._put("counts", np.array([counts.tokens, counts.logit_rows, counts.prefill], np.int32))
        self._filled = batch, padded, counts, end
        return counts, self._memory[:end]

    def _fill_again(self, batch: StepBatch, padded: int) -> tuple[Counts, Int32] | None:
        """`fill` where the step before in this memory was a decode step of the same sequences: of its integers, those
        change that depend on tokens."""
        if self._filled is None:
            return None
        before, size, counts, end = self._filled
        same = batch.query_starts is before.query_starts and batch.logit_rows is before.logit_rows
        if size != padded or not same or len(batch.ids) != len(batch.past_lengths):
            return None
        sequences, past = len(batch.past_lengths), batch.past_lengths
        self._put("ids", batch.ids)
        self._put("positions", past)
        for name in ("decode" if self._tiles.decode else "prefill", "runs"):
            if (items := self._layout.offsets.get(name)) is not None:
                self._memory[items : items + ITEM * sequences].reshape(-1, ITEM)[:, 3] = past
        if batch.block_tables is not before.block_tables:
            self._put_tables(batch.block_tables, padded - sequences)
        self._filled = batch, padded, counts, end
        return counts, self._memory[:end]

    def _items(self, batch: StepBatch, new: Int32) -> tuple[Int32, Int32]:
        """int32 [items, ITEM] of decode, of prefill."""
        columns = (np.arange(len(new)), batch.query_starts[:-1], new, batch.past_lengths)
        whole, step = np.stack(columns, axis=1).astype(np.int32), self._tiles.prefill
        short = new <= self._tiles.decode
        prefill = [
            (sequence, first + begin, min(step, count - begin), past + begin)
            for sequence, first, count, past in whole[~short].tolist()
            for begin in range(0, count, step)
        ]
        if (new > 1).any():  # those that take longest first: what runs last is short. `_fill_again` needs them in order
            prefill.sort(key=lambda item: -(item[2] + item[3]))
        return whole[short], np.array(prefill, np.int32).reshape(-1, ITEM)

    def _put(self, name: str, values: Int32) -> None:
        begin = self._layout.offsets[name]
        self._memory[begin : begin + len(values)] = values

    def _put_tables(self, tables: Int32, extra: int) -> int:
        width, groups, sequences = self._layout.width, self._layout.groups, tables.shape[1]
        begin = self._layout.offsets["tables"]
        end = begin + (sequences + extra) * width
        rows = self._memory[begin:end].reshape(-1, groups, width // groups)
        used = min(width // groups, tables.shape[2])
        rows[:] = -1
        rows[:sequences, :, :used] = tables[..., :used].swapaxes(0, 1)
        rows[sequences:, :, 0] = self._spare_blocks
        return int(end)
