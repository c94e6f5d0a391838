"""Teams of threads: several sessions at once, and more threads than cores."""

import threading

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.plan import Attr
from tests.plugins.cpu.one_step import Packed, activations_of, native_outputs, open_step, plain_batch

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


@pytest.mark.parametrize("threads", [2, 9, 16])
def test_panels_that_are_left_for_the_first_to_finish_are_computed_in_every_call(threads: int) -> None:
    """The last quarter of each group's panels is given out anew: no column keeps the number of the call before."""
    n, k, kernel = 4168, 2048, "matmul.bf16.avx2"
    weight = Packed(values=np.ones((n, k), np.float32), dtype=DType.BF16, panels=True)
    attrs: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": activations_of(kernel), "group": 0}
    batch = plain_batch(1)
    session = open_step(kernel, [np.zeros((1, k), np.float32), weight, None, None], attrs, batch, threads=threads)
    for value in (1.0, 2.0, 3.0):
        session.native.write_buffer("in0", np.full((1, k), value, np.float32))
        np.testing.assert_array_equal(native_outputs(session, batch)[0], np.full((1, n), k * value, np.float32))
