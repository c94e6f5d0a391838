"""Runs an engine's own plan with its own kernels, and keeps what every step wrote, or the logits alone.

Sequences run one after the other, in chunks as an executor would cut them: a prompt, then its last token alone, so
that both the kernels of many rows and those of one are seen. Results of a sequence do not depend on how often it runs,
therefore the steps may be tapped a few at a time, as memory allows.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ingot.fixed_tables import fixed_tables
from ingot.plan import Plan
from ingot.plugins.registry import find_op
from ingot.step_io import Float32, Int32, Session, StepBatch, TapSession

TAP_BYTES = 256 << 20  # of outputs that are kept at a time

Outputs = Mapping[str, Float32]
"""buffer → [tokens, cols]; rows of logit buffers are all tokens too"""


class PlainRun:
    """sequences: int32 [count, length]. The session needs the `blocks_needed` of fixed tables and is used by nobody
    else."""

    def __init__(self, session: Session, plan: Plan, sequences: Int32) -> None:
        self._session, self._plan, self._sequences = session, plan, sequences
        count, length = sequences.shape
        self._tables = fixed_tables(plan, sequences=count, length=length)

    def logits(self) -> Float32:
        """Logits of every token, [count * length, vocab]."""
        found: list[Float32] = []
        for number in range(len(self._sequences)):
            for batch in self._chunks(number):
                logits = self._session.run(dataclasses.replace(batch, want_logits=True)).logits
                assert logits is not None, "they were wanted"
                found.append(logits)
        return np.concatenate(found)

    def _chunks(self, number: int) -> Iterator[StepBatch]:
        """Steps that compute one sequence, all logits wanted."""
        limits, ids = self._plan.limits, self._sequences[number]
        most, last = min(limits.max_num_tokens, limits.max_logit_rows), len(ids) - 1
        for begin in [*range(0, last, most), last]:
            chunk = ids[begin : min(begin + most, last) if begin < last else last + 1]
            yield StepBatch(
                ids=chunk,
                query_starts=np.array([0, len(chunk)], np.int32),
                past_lengths=np.array([begin], np.int32),
                block_tables=np.ascontiguousarray(self._tables[:, number : number + 1]),
                logit_rows=np.arange(len(chunk), dtype=np.int32),
                slots=np.full(1, -1, np.int32),
                draws=np.empty(0, np.int32),
            )


class TappedRun(PlainRun):
    """The same of a session whose inside can be looked at."""

    def __init__(self, session: TapSession, plan: Plan, sequences: Int32) -> None:
        super().__init__(session, plan, sequences)
        self._taps = session

    @property
    def batch(self) -> StepBatch:
        """All sequences as one step, as the references of the ops take them."""
        count, length = self._sequences.shape
        return StepBatch(
            ids=self._sequences.reshape(-1),
            query_starts=np.arange(count + 1, dtype=np.int32) * length,
            past_lengths=np.zeros(count, np.int32),
            block_tables=self._tables,
            logit_rows=np.arange(count * length, dtype=np.int32),
            slots=np.full(count, -1, np.int32),
            draws=np.empty(0, np.int32),
        )

    def steps(self) -> Iterator[tuple[str, Outputs]]:
        """Every step of the plan in order, with what it wrote."""
        pending: list[str] = []
        size, rows = 0, self._sequences.size
        cols = {buffer.name: buffer.cols for buffer in self._plan.buffers}
        for step in self._plan.steps:
            nbytes = 4 * rows * sum(cols[name] for name in step.outputs if name)
            if pending and size + nbytes > TAP_BYTES:
                yield from self._run(pending)
                pending, size = [], 0
            pending.append(step.name)
            size += nbytes
        yield from self._run(pending)

    def routes(self) -> dict[str, Float32]:
        """The experts that every token takes, [tokens, taken], by the name of the step that chooses them."""
        choosing = {step.name: step.outputs[0] for step in self._plan.steps if find_op(step.op).routes}
        return {name: outputs[choosing[name]] for name, outputs in self._run(list(choosing))} if choosing else {}

    def kv(self, layer: int) -> tuple[Float32, Float32]:
        """Keys and values in the cache, each [blocks, kv_heads, tokens_per_block, head_dim]; after the first step."""
        blocks = [self._taps.read_kv(layer, block) for block in range(self._tables[0].size)]
        return np.stack([keys for keys, _ in blocks]), np.stack([values for _, values in blocks])

    def _run(self, names: Sequence[str]) -> Iterator[tuple[str, Outputs]]:
        pieces: dict[str, dict[str, list[Float32]]] = {name: {} for name in names}
        for number in range(len(self._sequences)):
            for batch in self._chunks(number):
                for step, outputs in self._taps.run_tapped(batch, names)[1].items():
                    for buffer, values in outputs.items():
                        pieces[step].setdefault(buffer, []).append(values)
        for name in names:
            yield name, {buffer: np.concatenate(parts) for buffer, parts in pieces.pop(name).items()}


def longest_sequence(plan: Plan) -> int:
    """Tokens of a sequence that an engine can compute: the last one generated is never fed back."""
    return min(plan.max_positions, plan.limits.max_seq_len - 1)
