"""Requests that decode on and on: the same steps as if every request were looked at before each of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from ingot.runtime.block_manager import BlockManager
from ingot.runtime.steady_decode import SteadyDecode
from ingot.step_io import StepBatch
from tests.runtime.fake_session import SubmittingSession
from tests.runtime.repeating import LIMITS, check, request_of
from tests.runtime.tiny_engine import make_loop


def run(num_blocks: int, counts: Sequence[int]) -> tuple[list[list[int]], list[int], dict[str, int]]:
    """Tokens of requests, the pasts of all steps' sequences, and what happened."""
    pasts: list[int] = []

    class Noting(SubmittingSession):
        def submit(self, batch: StepBatch) -> None:
            pasts.extend([*batch.past_lengths.tolist(), *batch.block_tables.ravel().tolist()])
            super().submit(batch)

    loop = make_loop(Noting(num_blocks, 4, LIMITS), LIMITS, 4)[0]
    requests = [request_of([1] * (1 + n % 3), count) for n, count in enumerate(counts)]
    loop.add(requests)
    loop.drain()
    for request in requests:
        check(request)
    stats = loop.stats()
    return [request.tokens.tolist() for request in requests], pasts, {"preemptions": stats["preemptions"]}


@pytest.mark.parametrize("num_blocks", [400, 9])
def test_steps_are_the_same(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    counts = [20, 9, 20, 13]
    found = run(num_blocks, counts)
    monkeypatch.setattr(SteadyDecode, "goes_on", lambda self: False)
    assert found == run(num_blocks, counts)
    assert (found[2]["preemptions"] > 0) == (num_blocks == 9)


def test_few_requests_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three that decode 20 tokens, each needs a block every four steps."""
    looked, reserve = [0], BlockManager.reserve

    def counted(self: BlockManager, wanted: Any) -> bool:
        looked[0] += len(wanted)
        return reserve(self, wanted)

    monkeypatch.setattr(BlockManager, "reserve", counted)
    run(400, [20, 20, 20])
    few, looked[0] = looked[0], 0
    monkeypatch.setattr(SteadyDecode, "goes_on", lambda self: False)
    run(400, [20, 20, 20])
    assert few < looked[0] / 2
