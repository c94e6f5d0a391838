"""The work of ops that ranks compute together: NCCL moves numbers, and kernels of ingot put them together.

    all_reduce, few numbers    every rank gets what all have, and adds it
    all_reduce, many numbers   every rank gets its share of what all have, adds it, and gives all others the sums
    all_gather                 every rank gets the columns of all
    send, recv                 rows go from a stage to the next one

A rank of p ranks gets (p - 1) * n numbers the first way, and 2 * (p - 1) / p * n the second way, in one more operation.
Both add in the order of the op, so both give the same bits.
"""

from ingot.plan import Plan, Rows, Step
from ingot.plugins.cuda.nccl import Communicator
from ingot.plugins.cuda.step_tables import Counts
from ingot.plugins.cuda.work import Among, Exchange, Grid, Launch, Work, count_of, integer, pointer, row_grid
from ingot.plugins.ops import all_gather, all_reduce

MANY = (256 << 10) // 4  # numbers from which on ranks add shares; not measured
_THREADS, _STRIP, _FOUR, _FLOAT = 256, 4 * 256, 4, 4
_ALL = -1  # for the kernel: the sums of all numbers, not of a share


def share_begin(numbers: int, rank: int, ranks: int) -> int:
    """Where the share of a rank begins, of numbers that ranks divide: at a multiple of four. As in kernels/ranks.cu."""
    return numbers if rank == ranks else numbers // _FOUR * rank // ranks * _FOUR


def column_begin(columns: int, rank: int, ranks: int) -> int:
    """Where the columns of a rank begin, as `split_ranks` divides them."""
    return columns * rank // ranks


def exchanged_bytes(plan: Plan) -> int:
    """Scratch memory that the steps of a plan need for what ranks bring."""
    rows = {Rows.TOKENS: plan.limits.max_num_tokens, Rows.LOGITS: plan.limits.max_logit_rows}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    return _FLOAT * max(
        (
            _numbers(step, rows[buffers[step.outputs[0]].rows], buffers[step.outputs[0]].cols)
            for step in plan.steps
            if step.op in (all_reduce.OP.name, all_gather.OP.name)
        ),
        default=0,
    )


def _numbers(step: Step, rows: int, cols: int) -> int:
    """cols: of the result. Few numbers are there of each rank; many once, with a share that is rounded up."""
    if step.op == all_gather.OP.name:
        return rows * cols
    ranks = int(step.attrs["ranks"])
    return max(ranks * min(rows * cols, MANY), rows * cols + 2 * _FOUR * ranks)


def reduce_work(
    *, y: int, x: int, scratch: int, counts: int, cols: int, ranks: int, place: int, rows: Rows
) -> list[Work]:
    """y = the sum of all ranks' x. Addresses; counts: of the number of rows; place: of this rank in its stage."""

    def numbers(given: Counts) -> int:
        return count_of(rows, given) * cols

    def few(given: Counts) -> int:
        return numbers(given) if numbers(given) < MANY else 0

    def many(given: Counts) -> int:
        return numbers(given) if numbers(given) >= MANY else 0

    def gather(group: Communicator, given: Counts) -> None:
        group.all_gather(scratch, x, few(given))

    def scatter(group: Communicator, given: Counts) -> None:
        total = many(given)
        own = _share(total, place, ranks)
        with group.together():
            for rank in range(ranks):
                group.send(x + _FLOAT * share_begin(total, rank, ranks), _share(total, rank, ranks), rank)
                group.receive(scratch + _FLOAT * rank * own, own, rank)

    def spread(group: Communicator, given: Counts) -> None:
        total = many(given)
        with group.together():
            for rank in range(ranks):
                if rank != place:
                    group.send(y + _FLOAT * share_begin(total, place, ranks), _share(total, place, ranks), rank)
                    group.receive(y + _FLOAT * share_begin(total, rank, ranks), _share(total, rank, ranks), rank)

    def added(rank: int, grid: Grid) -> Launch:
        arguments = (pointer(y), pointer(scratch), pointer(counts), integer(cols), integer(ranks), integer(rank))
        return Launch(kernel="add_ranks", grid=grid, threads=_THREADS, shared=0, arguments=arguments)

    return [
        Exchange(among=Among.STAGE, run=gather, numbers=lambda given: (ranks - 1) * few(given)),
        added(_ALL, lambda given, splits: (-(-few(given) // _STRIP), 1, 1)),
        Exchange(among=Among.STAGE, run=scatter, numbers=lambda given: (ranks - 1) * _share(many(given), place, ranks)),
        added(place, lambda given, splits: (-(-_share(many(given), place, ranks) // _STRIP), 1, 1)),
        Exchange(among=Among.STAGE, run=spread, numbers=lambda given: many(given) - _share(many(given), place, ranks)),
    ]


def gather_work(*, y: int, x: int, scratch: int, cols: int, ranks: int, place: int, rows: Rows) -> list[Work]:
    """y = the columns of all ranks side by side. cols: of y."""

    def width(rank: int) -> int:
        return column_begin(cols, rank + 1, ranks) - column_begin(cols, rank, ranks)

    def gather(group: Communicator, given: Counts) -> None:
        count = count_of(rows, given)
        if cols % ranks == 0:
            group.all_gather(scratch, x, count * width(place))
            return
        with group.together():
            for rank in range(ranks):
                group.send(x, count * width(place), rank)
                group.receive(scratch + _FLOAT * count * column_begin(cols, rank, ranks), count * width(rank), rank)

    arguments = (pointer(y), pointer(scratch), integer(cols), integer(ranks))
    return [
        Exchange(among=Among.STAGE, run=gather, numbers=lambda given: count_of(rows, given) * (cols - width(place))),
        Launch(
            kernel="join_ranks",
            grid=row_grid(rows, -(-cols // _STRIP)),
            threads=_THREADS,
            shared=0,
            arguments=arguments,
        ),
    ]


def send_work(x: int, *, cols: int, rows: Rows) -> Exchange:
    """To the rank at the same place of the next stage. It counts as much as it moves."""

    def send(group: Communicator, given: Counts) -> None:
        group.send(x, count_of(rows, given) * cols, group.rank + 1)

    return Exchange(among=Among.PIPELINE, run=send, numbers=lambda given: count_of(rows, given) * cols)


def receive_work(y: int, *, cols: int, rows: Rows) -> Exchange:
    """From the rank at the same place of the stage before."""

    def receive(group: Communicator, given: Counts) -> None:
        group.receive(y, count_of(rows, given) * cols, group.rank - 1)

    return Exchange(among=Among.PIPELINE, run=receive, numbers=lambda given: count_of(rows, given) * cols)


def _share(numbers: int, rank: int, ranks: int) -> int:
    return share_begin(numbers, rank + 1, ranks) - share_begin(numbers, rank, ranks)
