"""What an engine loses and how fast its steps are: KL from the reference, and timed steps of its own plan."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.bench.latency import LatencyOptions, bench_latency
from ingot.compare.logit_metrics import log_softmax
from ingot.configs.runtime import runtime_config
from ingot.engine import read_manifest
from ingot.errors import TargetError
from ingot.fixed_tables import blocks_needed
from ingot.plan import Plan
from ingot.runtime import ModelRunner
from ingot.runtime.session import load_engine
from ingot.step_io import TimedSession
from ingot.timed_run import TimedRun, TimedStep

CONTEXT = 128  # tokens before a decode step
STEPS = 12  # that decode in a phase, at most
LEAST_STEPS = 3
SECONDS = 1.5  # a phase that took so long ends
_ROWS = 64  # of logits that are compared at a time

Float32 = npt.NDArray[np.float32]
Windows = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """kl: mean, in nats. perplexity: of the text."""

    kl: float
    perplexity: float


class Reference:
    """Logits of an exact engine, in a file of float32: those of a whole text would fill the memory."""

    def __init__(self, engine: Path, windows: Windows, file: Path) -> None:
        self.windows = windows
        with ModelRunner.from_dir(engine, max_batch_size=1, enable_prefix_cache=False) as runner:
            width = runner.engine.plan.vocab_size
            self._logits = np.memmap(file, np.float32, "w+", shape=(sum(map(len, windows)), width))
            begin = 0
            for logits in _logits(runner, windows):
                self._logits[begin : begin + len(logits)] = logits
                begin += len(logits)

    def loss(self, engine: Path) -> Loss:
        """What another engine of the model loses on the text. Raises TargetError where it gives no numbers."""
        with ModelRunner.from_dir(engine, max_batch_size=1, enable_prefix_cache=False) as runner:
            found = self._loss(_logits(runner, self.windows))
        if not np.isfinite([found.kl, found.perplexity]).all():
            raise TargetError(
                "an engine gives logits that are not numbers",
                where=str(engine),
                hint="compare the engine with its Checkpoint: `ingot verify ENGINE --against CHECKPOINT`",
            )
        return found

    @property
    def perplexity(self) -> float:
        """What the exact engine has on the text."""
        return self._loss(self._own()).perplexity

    def _own(self) -> Iterator[Float32]:
        for begin, window in zip(self._begins, self.windows, strict=True):
            yield self._logits[begin : begin + len(window)]

    def _loss(self, others: Iterator[Float32]) -> Loss:
        divergence, surprise, foretold = 0.0, 0.0, 0
        for window, own, other in zip(self.windows, self._own(), others, strict=True):
            for row in range(0, len(window), _ROWS):
                exact, found = (log_softmax(each[row : row + _ROWS].astype(np.float64)) for each in (own, other))
                divergence += float((np.exp(exact) * (exact - found)).sum())
                following = np.asarray(window[row + 1 : row + 1 + _ROWS], np.intp)  # none after the last
                surprise -= float(found[np.arange(len(following)), following].sum())
                foretold += len(following)
        return Loss(kl=divergence / len(self._logits), perplexity=math.exp(surprise / max(foretold, 1)))

    @property
    def _begins(self) -> list[int]:
        return [0, *itertools.accumulate(map(len, self.windows))][:-1]


def _logits(runner: ModelRunner, windows: Windows) -> Iterator[Float32]:
    for window in windows:
        out = runner.generate([list(window)], max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
        yield out["context_logits"][0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Tokens per second. decode: by sequences that decode together, after CONTEXT tokens."""

    decode: dict[int, float]
    prefill: float


def step_speed(engine: Path, batches: Sequence[int]) -> Speed:
    """From steps of the engine's own plan, without scheduler and text. Raises TargetError for a target that does not
    time its steps."""
    loaded = load_engine(engine, runtime_config())
    session, plan = loaded.session, loaded.engine.plan
    try:
        if not isinstance(session, TimedSession):
            raise TargetError(
                "ingot advise supports CPU targets only",
                expected="a target of this machine's CPU",
                got=loaded.engine.manifest.target,
            )
        return _speed(session, plan, batches)
    finally:
        session.close()
        loaded.engine.close()


def length_for(positions: int) -> int:
    """Tokens of a sequence, of a model with so many positions."""
    return min(CONTEXT + STEPS + 1, positions)


def _speed(session: TimedSession, plan: Plan, batches: Sequence[int]) -> Speed:
    length = length_for(min(plan.limits.max_seq_len, plan.max_positions))
    context = max(1, length - STEPS - 1)
    needed = blocks_needed(plan, sequences=max(batches), length=length)
    assert all(have >= need for have, need in zip(session.num_blocks, needed, strict=True)), "the build has the limits"
    run, draw = TimedRun(session, plan, sequences=max(batches), length=length), np.random.default_rng(0)

    def prompt() -> TimedStep:
        return run.prefill(draw.integers(0, plan.vocab_size, context).astype(np.int32))[0]

    prompt()
    prefill = context / _median([prompt() for _ in range(LEAST_STEPS)])
    run.share_prompt()
    decode = {}
    for size in batches:
        ids = draw.integers(0, plan.vocab_size, size).astype(np.int32)
        run.decode(ids, context)
        steps: list[TimedStep] = []
        while len(steps) < STEPS and (len(steps) < LEAST_STEPS or sum(each.seconds for each in steps) < SECONDS):
            steps.append(run.decode(ids, context + len(steps)))
        decode[size] = size / _median(steps)
    return Speed(decode=decode, prefill=prefill)


def request_speed(engine: Path, batches: Sequence[int]) -> dict[int, float]:
    """Tokens per second of whole requests, as `ingot bench latency` measures them, by requests that run together.

    The median gap between tokens counts, not TPOT: answers are short, so the first gaps hold the prompts of others.
    """
    length = length_for(read_manifest(engine).limits.max_seq_len)
    context = max(1, length - STEPS - 1)
    options = LatencyOptions(
        engine_dir=engine, input_len=context, output_len=length - context, batch_sizes=tuple(batches), repetitions=3
    )
    report = bench_latency(options, lambda what, done, total: None)
    return {
        each.batch_size: 1e3 * each.batch_size / statistics.median(each.itl_ms)
        for each in report.batches
        if each.itl_ms
    }


def _median(steps: Sequence[TimedStep]) -> float:
    return statistics.median(each.seconds for each in steps)
