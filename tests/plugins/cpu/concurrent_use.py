"""Uses of native sessions that would hang or crash if they went wrong, each for a process of its own:

python concurrent_use.py NAME
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import CapacityError, IngotError, RequestError
from ingot.plan import CacheGroup
from ingot.plugins.cpu.native import barrier_seconds
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ahead
from tests.plugins.cpu.one_step import batch_of, hold, native_outputs, one_step_plan, open_step, plain_batch

BATCH = batch_of([(20, 2), (0, 1)], [[0, 1], [2]], [1, 2], draws=[0, 1])

DECODING = batch_of([(20, 1), (5, 1)], [[0, 1], [2]], [0, 1], draws=[0, 1])


def open_small(threads: int) -> CpuSession:
    """A session for BATCH."""
    batch = batch_of([(0, 60), (0, 2)], [[0, 1, 2, 3], [4]], [0, 1])
    return open_step("gather_rows.f32.avx2", [np.ones((62, 5), np.float32)], {}, batch, threads=threads)


def teams_of_two_sizes() -> None:
    """The larger one takes threads into a group that the smaller one has in part. Thread 0 is mostly first in both."""
    x = np.arange(65 * 63, dtype=np.float32).reshape(65, 63)
    batch = plain_batch(65)
    sessions = [open_step("add.f32.avx2", [x, x], {}, batch, threads=threads) for threads in (9, 12, 16)]
    for _ in range(30):
        for session in sessions:
            session.run(batch)
    np.testing.assert_array_equal(native_outputs(sessions[1], batch)[0], x + x)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


def threads_that_cannot_start() -> None:
    """Refused in words as often as it is tried, signals as they were; all is well again when threads can be had."""
    open_small(2).run(BATCH)
    if os.getuid() == 0:
        os.setuid(65534)  # root has no such limit
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    there = num_threads()
    with no_more_threads():
        for attempt in (lambda: open_small(5), lambda: barrier_seconds(5), lambda: open_small(5)):
            with pytest.raises(CapacityError, match=r"(?s)thread 3 of 5.*ulimit"):
                attempt()
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == signals
        assert open_small(2).run(BATCH).ids.tolist() == [[0, 0]]
        assert num_threads() == there
    session = open_small(5)
    assert num_threads() == there + 3  # the step to come starts none
    assert session.run(BATCH).ids.tolist() == [[0, 0]]
    a_child_without_threads(session)


def a_child_without_threads(session: CpuSession) -> None:
    """A forked child has to start its own when it runs a step."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        refused = 0
        with no_more_threads():
            for _ in range(3):
                try:
                    session.run(BATCH)
                except CapacityError:
                    refused += 1
        os._exit(0 if refused == 3 and session.run(BATCH).ids.tolist() == [[0, 0]] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _hooks(session: CpuSession) -> dict[str, Callable[[], object]]:
    native = session.native
    block = native.read_kv(0, 0, False)
    return {
        "time_steps": lambda: native.time_steps(True),
        "step_seconds": native.step_seconds,
        "variant": lambda: native.variant,
        "barriers": lambda: native.barriers,
        "tap": lambda: native.tap(["step"]),
        "drain_tapped": native.drain_tapped,
        "items_taken": native.items_taken,
        "read_buffer": lambda: native.read_buffer("in0", 3),
        "write_buffer": lambda: native.write_buffer("in0", np.ones((3, 5), np.float32)),
        "fill_kv": lambda: native.fill_kv(1.0),
        "read_kv": lambda: native.read_kv(0, 1, True),
        "write_kv": lambda: native.write_kv(0, 0, False, block),
        "slow_down": lambda: session.slow_down(0.12),
        "start": lambda: hold(session, 2),
        "run": lambda: session.run(BATCH),
    }


def decode_with_signal(session: CpuSession, handle: Callable[[], None], *, steps: int) -> None:
    """Steps that follow each other, so many at most; a signal handler calls `handle` in the middle of one."""
    session.slow_down(0.12)  # a step asks for signals after 100 ms

    def send() -> None:
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGALRM)

    signal.signal(signal.SIGALRM, lambda *_: handle())
    sender = threading.Thread(target=send)
    sender.start()
    ahead = Ahead(most_steps=steps, seconds=60, stop=np.zeros(1, np.int32))
    assert session.run(DECODING, ahead).ids.shape == (steps, 2)
    sender.join()


def hooks_beside_a_step() -> None:
    """The main thread asks for Python's signals in the middle of a step, when others wait for the session."""
    session = open_small(2)
    begun = threading.Event()

    def call(hook: Callable[[], object]) -> None:
        begun.wait()
        hook()

    others = [threading.Thread(target=call, args=(hook,), name=name) for name, hook in _hooks(session).items()]
    for other in others:
        other.start()
    decode_with_signal(session, begun.set, steps=6)  # the others wait from then on, and the steps ask again
    for other in others:
        other.join()


def hooks_beside_close() -> None:
    """Whatever reads or writes the memory of a session is done with it, or refused, when it goes."""
    x = np.ones((16, 5), np.float32)
    kv = CacheGroup(layers=tuple(range(8)), kv_heads=8, head_dim=128, tokens_per_block=16, dtype=DType.F32)
    plan, section = one_step_plan("gather_rows.f32.avx2", [x], {}, BATCH, kv)
    for round in range(10):
        session = open_native(plan, section, SessionOptions(num_blocks=(16,), threads=1 + round % 2), "avx2")
        hold(session, 2)
        hooks = {name: hook for name, hook in _hooks(session).items() if name != "slow_down"}
        refused: list[str] = []
        ready = threading.Barrier(len(hooks) + 1)

        def hammer(hook: Callable[[], object], refused: list[str] = refused, ready: threading.Barrier = ready) -> None:
            ready.wait()
            try:
                for _ in range(20):
                    hook()
            except (ValueError, RequestError) as error:
                refused.append(str(error))

        threads = [threading.Thread(target=hammer, args=(hook,)) for hook in hooks.values()]
        for thread in threads:
            thread.start()
        ready.wait()
        session.close()
        for thread in threads:
            thread.join()
        assert all("closed" in words for words in refused), refused


def a_handler_in_a_step() -> None:
    """It has the CPUs of the caller, and what it starts has them too; using a session is refused, not waited for."""
    session, other = open_small(2), open_small(3)
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    refused: list[str] = []

    def handle() -> None:
        seen.append(os.sched_getaffinity(0))
        child = os.fork()
        if child == 0:
            os._exit(0 if os.sched_getaffinity(0) == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for use in (lambda: session.run(BATCH), session.close, lambda: other.run(BATCH), lambda: barrier_seconds(2)):
            try:
                use()
            except (IngotError, ValueError) as error:
                refused.append(str(error))

    beside = threading.Timer(
        0.15, other.run, [BATCH]
    )  # holds that session when the handler comes, and waits for the step
    beside.start()
    decode_with_signal(session, handle, steps=4)
    beside.join()
    assert seen == [before]
    assert len(refused) == 4
    assert all("signal handler" in words for words in refused), refused
    assert os.sched_getaffinity(0) == before
    session.slow_down(0)
    assert session.run(BATCH).ids.tolist() == other.run(BATCH).ids.tolist() == [[0, 0]]


def a_planted_race() -> None:
    """The block tables of a batch change while it is read: ThreadSanitizer has to report it (.ci/tsan).

    It sees memmove, and not the loops of numpy.
    """
    session = open_small(2)
    used = BATCH.block_tables.shape[2]
    tables = np.full((1, 2, 1 << 16), -1, np.int32)
    tables[..., :used] = BATCH.block_tables
    batch, same = dataclasses.replace(BATCH, block_tables=tables), tables.copy()
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            ctypes.memmove(tables.ctypes.data, same.ctypes.data, tables.nbytes)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(50):
        session.run(batch)
    over.set()
    writer.join()


USES = {
    use.__name__: use
    for use in (
        teams_of_two_sizes,
        threads_that_cannot_start,
        hooks_beside_a_step,
        hooks_beside_close,
        a_handler_in_a_step,
    )
}

if __name__ == "__main__":
    faulthandler.dump_traceback_later(50, exit=True)  # says where it hangs
    {**USES, "a_planted_race": a_planted_race}[sys.argv[1]]()
