"""An executor whose session repeats steps, requests for it, and what they must bring."""

import numpy as np

from ingot.plan import Limits
from ingot.runtime.executor import Executor
from ingot.runtime.request import Request
from tests.runtime.fake_session import RepeatingSession, continued
from tests.runtime.tiny_engine import make_executor

LIMITS = Limits(max_batch_size=8, max_input_len=40, max_seq_len=200, max_num_tokens=32, max_logit_rows=8)


def make() -> tuple[Executor, RepeatingSession]:
    session = RepeatingSession(400, 4, LIMITS)
    return make_executor(session, LIMITS, 4)[0], session


def request_of(prompt: list[int], count: int, end_ids: frozenset[int] = frozenset()) -> Request:
    return Request(np.array(prompt, np.int32), max_new_tokens=count, end_ids=end_ids)


def check(request: Request) -> None:
    prompt = request.tokens[: request.num_prompt].tolist()
    assert request.generated().tolist() == continued(prompt, request.num_generated)
    assert request.log_probs == [-float(n) for n in range(request.num_generated)]
