"""Teams of threads: several sessions at once, and more threads than cores."""

import threading

import numpy as np
import pytest

from tests.plugins.cpu.one_step import native_outputs, open_step, plain_batch

pytestmark = pytest.mark.native


def test_sessions_of_several_threads_take_turns() -> None:
    x = np.random.default_rng(0).standard_normal((65, 63)).astype(np.float32)
    batch = plain_batch(65)
    sessions = [open_step("add.f32.avx2", [x * i, x], {}, batch, threads=1 + i) for i in range(4)]
    problems: list[str] = []

    def hammer(index: int) -> None:
        for _ in range(50):
            if not np.array_equal(native_outputs(sessions[index], batch)[0], x * index + x):
                problems.append(f"session {index}")

    workers = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert problems == []


@pytest.mark.parametrize("threads", [2, 5, 64])
def test_more_threads_than_cores_work_when_asked_for(threads: int) -> None:
    x = np.arange(65 * 63, dtype=np.float32).reshape(65, 63)
    session = open_step("add.f32.avx2", [x, x], {}, plain_batch(65), threads=threads)
    for _ in range(3):
        np.testing.assert_array_equal(native_outputs(session, plain_batch(65))[0], x + x)
