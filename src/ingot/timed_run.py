"""Steps of an engine with the time of each of its parts: prompts and decode steps as an executor would make them.

A prompt is computed by the first sequence; `share_prompt` gives the others copies of its keys, values and states, so
that decode steps of many sequences read as much as they would in service.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from ingot.fixed_tables import fixed_tables
from ingot.plan import Plan
from ingot.step_io import Int32, SequenceRules, StepBatch, StepTimes, TimedSession
from ingot.step_work import Load


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """seconds: of the whole crossing; ids: drawn."""

    load: Load
    seconds: float
    times: StepTimes
    ids: Int32


class TimedRun:
    """`sequences` of up to `length` tokens; the session needs the `blocks_needed` of fixed tables and is used by nobody
    else meanwhile."""

    def __init__(self, session: TimedSession, plan: Plan, *, sequences: int, length: int) -> None:
        self._session, self._plan = session, plan
        self._tables = fixed_tables(plan, sequences=sequences, length=length)
        for slot in range(sequences):
            session.start(slot, SequenceRules(log_prob=False), np.zeros(1, np.int32), 1)

    def prefill(self, ids: Int32, sequence: int = 0) -> list[TimedStep]:
        """A sequence computes a prompt, in chunks of what a step may carry, and draws a token."""
        most = self._plan.limits.max_num_tokens
        chunks = [(begin, ids[begin : begin + most]) for begin in range(0, len(ids), most)]
        return [
            self._run(chunk, [(begin, len(chunk))], draws=begin + most >= len(ids), first=sequence)
            for begin, chunk in chunks
        ]

    def share_prompt(self) -> None:
        """Copy what the first sequence has in the cache to all others."""
        for group, tables in enumerate(self._tables):
            for table in tables[1:]:
                for source, target in set(zip(tables[0].tolist(), table.tolist(), strict=True)):
                    self._session.copy_block(group, source, target)

    def decode(self, ids: Int32, past: int) -> TimedStep:
        """The next token of as many sequences as there are ids, each after `past` others."""
        return self._run(ids, [(past, 1)] * len(ids), draws=True)

    def _run(self, ids: Int32, sequences: Sequence[tuple[int, int]], *, draws: bool, first: int = 0) -> TimedStep:
        """first: number of the first of these sequences."""
        ends = np.cumsum([count for _, count in sequences])
        batch = StepBatch(
            ids=np.ascontiguousarray(ids, np.int32),
            query_starts=np.array([0, *ends], np.int32),
            past_lengths=np.array([past for past, _ in sequences], np.int32),
            block_tables=np.ascontiguousarray(self._tables[:, first : first + len(sequences)]),
            logit_rows=(ends - 1).astype(np.int32) if draws else np.empty(0, np.int32),
            slots=np.arange(first, first + len(sequences), dtype=np.int32),
            draws=np.arange(len(sequences) if draws else 0, dtype=np.int32),
        )
        begin = time.perf_counter()
        result, times = self._session.run_timed(batch)
        seconds = time.perf_counter() - begin
        load = Load(sequences=tuple(sequences), logit_rows=len(batch.logit_rows), best_only=True)
        return TimedStep(load=load, seconds=seconds, times=times, ids=result.ids[0])
