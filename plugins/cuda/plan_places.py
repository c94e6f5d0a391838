"""Where the steps of a plan find what they read and write on a GPU, and what brings it there."""

from ingot.dtypes import DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import Buffer, CacheGroup, Plan, Rows, Step
from ingot.plugins.cuda.attention import Places
from ingot.plugins.cuda.experts import Taken
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.plan_facts import specialisation, tiles_of, weight_places
from ingot.plugins.cuda.states import Slots
from ingot.plugins.cuda.tilings import in_ranges
from ingot.plugins.cuda.work import Addresses, Launch, cache_places, integer, number, pointer, row_grid, state_places

# input of a plan → table of a step, see step_tables.py; attention's items hold query_starts and past_lengths
_TABLES = {
    "input_ids": "ids",
    "positions": "positions",
    "token_sequences": "sequences",
    "block_tables": "tables",
    "logit_rows": "rows",
}
ROW_THREADS, STRIP = 256, 4 * 256  # columns of a block, where several share a row


class PlanPlaces:
    """Addresses of a plan's buffers, weights and tables."""

    def __init__(self, plan: Plan, at: Addresses) -> None:
        self._plan, self._at = plan, at
        self._types, self._tiles = specialisation(plan), tiles_of(plan)
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._weights = {weight.name: weight for weight in plan.weights}
        self._offsets, _ = weight_places(plan)
        # lists → ids by which rows are sorted there, of how many experts, into which tiles for which rows of a step
        self._sorted: dict[str, tuple[str, int, tuple[tuple[int, range], ...]]] = {}

    def _narrow(self, name: str) -> bool:
        """Whether what lies in a buffer has the products' type."""
        return self._buffers[name].dtype is not DType.F32

    # Addresses and sizes.

    def _buffer(self, name: str) -> int:
        return self._at.arena + self._buffers[name].offset

    def _weight(self, name: str) -> int:
        """0 where the input is absent."""
        return self._at.weights + self._offsets[name] if name else 0

    def _any(self, name: str) -> int:
        return self._buffer(name) if name in self._buffers else self._weight(name)

    def _shape(self, step: Step) -> tuple[Buffer, int]:
        """The first output and its columns."""
        buffer = self._buffers[step.outputs[0]]
        return buffer, buffer.cols

    def _table(self, name: str) -> Argument:
        return pointer(self._table_at(name))

    def _table_at(self, name: str) -> int:
        """Where an input of the plan lies; the items of attention are made of the others."""
        return self._at.tables[_TABLES[name]]

    def _tables_of(self, layer: int) -> int:
        """The first sequence's block table of a layer's cache group."""
        width = self._at.table_width // len(self._plan.caches)
        return self._table_at("block_tables") + 4 * width * self._plan.group_of(layer)

    # Parts of several ops.

    def _most_rows(self, rows: Rows) -> int:
        """The most rows of a step within the limits."""
        limits = self._plan.limits
        return limits.max_num_tokens if rows is Rows.TOKENS else limits.max_logit_rows

    def _counts(self, rows: Rows) -> int:
        return self._at.tables["counts"] + (0 if rows is Rows.TOKENS else 4)

    def _sorted_rows(self, step: Step, ids: str, lists: str, experts: int) -> Taken:
        """`_taken` of a step that reads the lists. Raises EngineError where they are of other rows."""
        found = self._sorted.get(lists)
        tiles = tuple((tile.rows, rows) for tile, rows in in_ranges(self._plan, step))
        if found != (ids, experts, tiles):
            raise EngineError(
                "cuda targets multiply rows of experts that are sorted before",
                where=f"kernel call {step.name}",
                expected=f"lists that sort_by_expert has made of {ids} for {experts} experts, {_tile_words(tiles)}",
                got="none" if found is None else f"lists of {found[0]} for {found[1]} experts, {_tile_words(found[2])}",
                hint=REBUILD,
            )
        return self._taken(ids, lists, experts)

    def _taken(self, ids: str, lists: str, experts: int) -> Taken:
        """The experts that rows take, and the buffer where they are sorted."""
        buffer = self._buffers[ids]
        return Taken(
            ids=self._buffer(ids),
            counts=self._counts(buffer.rows),
            lists=self._buffer(lists),
            experts=experts,
            slots=buffer.cols,
            rows=buffer.rows,
            most=self._most_rows(buffer.rows),
        )

    def _by_number(self, step: Step, kernel: str, value: float) -> Launch:
        """A kernel that computes each element of y from the same of x and a number."""
        buffer, cols = self._shape(step)
        arguments = (
            pointer(self._buffer(step.outputs[0])),
            pointer(self._buffer(step.inputs[0])),
            integer(cols),
            number(value),
        )
        grid = row_grid(buffer.rows, -(-cols // STRIP))
        return Launch(kernel=kernel, grid=grid, threads=ROW_THREADS, shared=0, arguments=arguments)

    def _slots(self, step: Step) -> Slots:
        layer = int(step.attrs["layer"])
        slots, size = state_places(self._plan.caches, self._at, layer)
        return Slots(
            runs=self._at.tables["runs"],
            slots=slots,
            tables=self._tables_of(layer),
            width=self._at.table_width,
            size=size,
        )

    def _places(self, step: Step, *, q: str) -> tuple[Places, CacheGroup]:
        layer, tables = int(step.attrs["layer"]), self._at.tables
        kv, keys, values = cache_places(self._plan.caches, self._at, layer)
        places = Places(
            keys=keys,
            values=values,
            tables=self._tables_of(layer),
            width=self._at.table_width,
            q=self._buffer(q),
            decode=tables["decode"],
            prefill=tables["prefill"],
            partial=self._at.partial,
            stats=self._at.stats,
            items=self._at.tables["counts"] + 8,
        )
        return places, kv


def _tile_words(tiles: tuple[tuple[int, range], ...]) -> str:
    return "tiles of " + ", ".join(f"{rows} for {steps.start} to {steps.stop - 1} rows" for rows, steps in tiles)
