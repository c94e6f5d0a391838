"""Times of the tokens of requests, taken where a client that streams sees them.

start ──TTFT──▶ token 1 ──gap──▶ token 2 ──gap──▶ ... token n = end        TPOT = (end - TTFT) / (n - 1)
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from ingot.configs.sampling import SamplingParams
from ingot.runtime.model_runner import ModelRunner
from ingot.step_io import Int32

GREEDY = SamplingParams(temperature=0.0)

Seen = tuple[float, Int32]
"""Seconds since the start, and the length of every sequence then."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """Seconds from the start of the measurement to each token of one request, ascending."""

    tokens: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0]

    @property
    def end(self) -> float:
        """Seconds to the last token."""
        return self.tokens[-1]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.end - self.ttft) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between neighbouring tokens (ITL)."""
        return tuple(after - before for before, after in itertools.pairwise(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """All requests of one measurement, how many steps they took together, and how long these were in the session."""

    requests: tuple[RequestTimes, ...]
    steps: int
    session_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """From the start to the last token of the last request."""
        return max(times.end for times in self.requests)

    @property
    def host_fraction(self) -> float:
        """Share of the time in which no kernel ran: scheduling, sampling arguments, handing out results."""
        return 1 - self.session_seconds / self.seconds

    @property
    def tokens(self) -> int:
        """Generated tokens of all requests."""
        return sum(len(times.tokens) for times in self.requests)


def random_prompts(count: int, length: int, vocab_size: int, *seed: int) -> list[list[int]]:
    """`count` prompts of `length` token ids each, all different.

    Rounds pass different seeds: prompts that come again would be found in the prefix cache and skip their prefill.
    """
    ids: list[list[int]] = np.random.default_rng(seed).integers(0, vocab_size, (count, length)).tolist()
    return ids


def time_requests(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], output_len: int, sampling: SamplingParams = GREEDY
) -> Round:
    """Generate exactly `output_len` tokens for every prompt, all given at once; no token ends a request."""
    params = dataclasses.replace(sampling, max_tokens=output_len)
    before, work_before = np.array([len(prompt) for prompt in prompts]), runner.executor.work()
    start = time.perf_counter()
    seen = [
        (time.perf_counter() - start, step["sequence_lengths"][:, 0])
        for step in runner.generate(
            batch_input_ids=prompts, sampling_config=params, end_id=-1, streaming=True, return_dict=True
        )
    ]
    work = runner.executor.work()
    times: list[list[float]] = [[] for _ in prompts]
    for now, after in seen:
        for index in np.flatnonzero(after > before):
            times[index] += [now] * int(after[index] - before[index])
        before = after
    return Round(
        requests=tuple(RequestTimes(tokens=tuple(tokens)) for tokens in times),
        steps=work.steps - work_before.steps,
        session_seconds=work.session_seconds - work_before.session_seconds,
    )
