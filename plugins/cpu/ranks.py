"""Where the processes of an engine's ranks meet: shared memory, which the first rank makes, or MPI."""

import contextlib
import os
from collections.abc import Iterator

from ingot.errors import IngotError, RankError
from ingot.plan import ALIGNMENT, Plan, Rows, Step
from ingot.plugins.cpu.native import _cpu
from ingot.plugins.ops import send
from ingot.plugins.registry import find_op
from ingot.plugins.target import RankLink, SessionOptions

_SIZES = 4  # numbers ahead of a batch's arrays
_FLOAT = 4  # bytes


@contextlib.contextmanager
def rank_errors() -> Iterator[None]:
    """Native words as RankError."""
    try:
        yield
    except _cpu.RankError as error:
        raise rank_failure(str(error)) from error


def rank_failure(words: str) -> RankError:
    """What all ranks say where one of them is lost."""
    return RankError(
        "a rank of the engine has failed",
        got=words,
        hint="read the last lines of that rank, then start all ranks again",
    )


def open_group(plan: Plan, link: RankLink, options: SessionOptions, *, moves: bool = True) -> "_cpu.RankGroup":
    """The ranks of `link`, each of which calls this. moves: whether what ranks bring to each other moves here, not only
    the batches of steps. Raises RankError."""
    stages = plan.stage[1]
    sizes = [_slot_bytes(plan), _batch_words(plan), _message_bytes(plan)] if moves else [0, _batch_words(plan), 0]
    slot, words, messages = map(max, zip(*link.exchange(sizes), strict=True))  # stages have other steps
    if options.shared_memory:
        return _open_window(link, (slot, words, stages, messages), options.rank_timeout)
    if (calls := link.mpi_calls(stages)) is None:
        raise RankError("the ranks were not started by MPI", hint="give all ranks one machine, or start them by mpirun")
    return _cpu.MpiGroup(calls, link.rank, link.count, slot, options.rank_timeout, stages, messages)


def _open_window(link: RankLink, shape: tuple[int, int, int, int], timeout: float) -> "_cpu.Window":
    """shape: bytes of a slot, numbers of a batch, stages, bytes of a step's messages."""
    slot, words, stages, messages = shape
    file, path = -1, ""
    try:
        if link.rank == 0:
            file = os.memfd_create("ingot ranks", os.MFD_CLOEXEC)
            os.ftruncate(file, _cpu.Window.bytes(link.count, slot, words, stages, messages))
            path = f"/proc/{os.getpid()}/fd/{file}"
        path = link.exchange(path)[0]
        window: _cpu.Window | None = None
        problem = ""
        try:
            with rank_errors():
                window = _cpu.Window(path, link.rank, link.count, slot, words, timeout, stages, messages)
        except IngotError as error:
            problem = str(error.got)
        problems = [each for each in link.exchange(problem) if each]
    finally:
        if file >= 0:
            os.close(file)  # those who have it hold it
    if window is None or problems:
        raise RankError("the ranks cannot share memory", got="; ".join(problems), hint="leave --collectives shm out")
    return window


def _slot_bytes(plan: Plan) -> int:
    """That a rank brings to the others in one step of the plan, at most, or as its part of a KV block. What is never
    used of it takes no memory."""
    brought = [_brought(plan, step) for step in plan.steps if find_op(step.op).collective is not None]
    return max(*brought, *(group.block_bytes for group in plan.caches), 0)


def _brought(plan: Plan, step: Step) -> int:
    x = next(buffer for buffer in plan.buffers if buffer.name == step.inputs[0])
    rows = plan.limits.max_num_tokens if x.rows is Rows.TOKENS else plan.limits.max_logit_rows
    columns = -(-int(step.attrs["columns"]) // int(step.attrs["ranks"])) if "columns" in step.attrs else x.cols
    return rows * max(x.cols, columns) * _FLOAT


def _message_bytes(plan: Plan) -> int:
    """That a rank passes on in one step of the plan, at most: each buffer ends on a cache line."""
    cols = {buffer.name: buffer.cols for buffer in plan.buffers}
    sent = [
        plan.limits.max_num_tokens * cols[step.inputs[0]] * _FLOAT for step in plan.steps if step.op == send.OP.name
    ]
    return sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sent)


def _batch_words(plan: Plan) -> int:
    """Numbers of a step's batch, at most: ids, starts, lengths, logit rows, and the block tables."""
    limits = plan.limits
    blocks = -(-plan.max_positions // plan.tokens_per_block) + 1
    tables = len(plan.caches) * limits.max_batch_size * blocks
    return _SIZES + limits.max_num_tokens + 2 * limits.max_batch_size + 1 + limits.max_logit_rows + tables
