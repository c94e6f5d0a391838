"""A loop whose session goes on by itself, requests for it, and what they must bring; native runs counted."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ingot.plan import Limits
from ingot.plugins.cpu.session import CpuSession
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, RepeatingSession, continued
from tests.runtime.tiny_engine import make_loop

LIMITS = Limits(max_batch_size=8, max_input_len=40, max_seq_len=200, max_num_tokens=32, max_logit_rows=8)


def make() -> tuple[StepLoop, RepeatingSession]:
    session = RepeatingSession(400, 4, LIMITS)
    return make_loop(session, LIMITS, 4)[0], session


def request_of(prompt: list[int], count: int, end_ids: frozenset[int] = frozenset()) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, end_ids=end_ids)


def check(request: Request) -> None:
    prompt = request.tokens[: request.num_prompt].tolist()
    assert request.generated().tolist() == continued(prompt, request.num_generated)
    assert request.log_probs == [-float(n) for n in range(request.num_generated)]


def steps_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each later native run of several brings."""
    calls: list[int] = []
    run = CpuSession.run

    def counted(session: CpuSession, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        result = run(session, batch, ahead)
        if ahead is not None:
            calls.append(len(result.ids))
        return result

    monkeypatch.setattr(CpuSession, "run", counted)
    return calls


def check_ends(requests: Sequence[Request]) -> None:
    for request in requests:
        check(request)
        if request.finish_reason is FinishReason.LENGTH:
            assert request.num_generated == request.max_new_tokens
        elif request.finish_reason is FinishReason.STOP:
            assert int(request.generated()[-1]) in request.end_ids
        assert request.finished


def run_random_requests(rng: random.Random, loop: StepLoop, session: FakeSession) -> None:
    """Requests come, are aborted and preempted, and a few steps fail: all end as they must and leave no block."""
    faults = 0

    def sometimes(batch: StepBatch) -> None:
        nonlocal faults
        if faults < 6 and rng.random() < 0.05:
            faults += 1
            raise ValueError("the kernel fell over")

    session.before_step = sometimes
    live: list[Request] = []
    for _ in range(40):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        ends = frozenset([rng.randrange(90)]) if rng.random() < 0.5 else frozenset[int]()
        live.append(request_of(prompt, rng.randrange(1, 60), ends))
        loop.add(live[-1:])
        for _ in range(rng.randrange(9)):
            loop.step()
        if rng.random() < 0.1:
            loop.abort([rng.choice(live)])
    loop.drain()
    check_ends(live)
    assert loop.stats()["blocks_used"] == 0
