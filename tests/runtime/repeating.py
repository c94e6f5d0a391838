"""A loop whose session goes on by itself, requests for it, and what they must bring; native runs counted."""

import numpy as np
import pytest

from ingot.plan import Limits
from ingot.plugins.cpu.session import CpuSession
from ingot.runtime.request import Request
from ingot.runtime.step_loop import StepLoop
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.runtime.fake_session import RepeatingSession, continued
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
