"""Runs an engine's own plan with its own kernels, and keeps what every step wrote, or the logits alone.

Sequences run one after the other, in chunks as an executor would cut them: a prompt, then its last token alone, so
that both the kernels of many rows and those of one are seen. Results of a sequence do not depend on how often it runs,
therefore the steps may be tapped a few at a time, as memory allows.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ingot.fixed_tables import fixed_tables
from ingot.plan import Plan, Step
from ingot.plugins.registry import find_op
from ingot.step_io import Float32, Int32, RanksTapSession, Session, StepBatch, TapSession

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


class OneRank:
    """A session of an engine's only rank, as that of all its ranks."""

    def __init__(self, session: TapSession) -> None:
        self.run_ranks_tapped = lambda batch, steps: [session.run_tapped(batch, steps[0])[1]]
        self.read_rank_kv = lambda rank, layer, block: session.read_kv(layer, block)


class TappedRun(PlainRun):
    """The same of a session whose inside can be looked at. plans: of all ranks, by number."""

    def __init__(self, session: TapSession | RanksTapSession, plans: Sequence[Plan], sequences: Int32) -> None:
        super().__init__(session, plans[0], sequences)
        self._plans = plans
        self._taps = session if isinstance(session, RanksTapSession) else OneRank(session)

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

    def steps(self, ranks: Sequence[int]) -> Iterator[list[Outputs]]:
        """What every step of these ranks' plans has written in each of them, in order. All have as many steps."""
        pending: list[Sequence[Step]] = []
        size, rows = 0, self._sequences.size
        cols = [{buffer.name: buffer.cols for buffer in self._plans[rank].buffers} for rank in ranks]
        for steps in zip(*(self._plans[rank].steps for rank in ranks), strict=True):
            nbytes = sum(
                4 * rows * own[name] for own, step in zip(cols, steps, strict=True) for name in step.outputs if name
            )
            if pending and size + nbytes > TAP_BYTES:
                yield from self._run(ranks, pending)
                pending, size = [], 0
            pending.append(steps)
            size += nbytes
        yield from self._run(ranks, pending)

    def routes(self, ranks: Sequence[int]) -> dict[str, Float32]:
        """The experts that every token takes, [tokens, taken], by the name of the step that chooses them. ranks: one of
        each pipeline stage."""
        found: dict[str, Float32] = {}
        for rank in ranks:
            choosing = [(step,) for step in self._plans[rank].steps if find_op(step.op).routes]
            if choosing:
                for (step,), (outputs,) in zip(choosing, self._run([rank], choosing), strict=True):
                    found[step.name] = outputs[step.outputs[0]]
        return found

    def kv(self, rank: int, layer: int) -> tuple[Float32, Float32]:
        """Keys and values in the cache, each [blocks, kv_heads, tokens_per_block, head_dim]; after the first step."""
        blocks = [self._taps.read_rank_kv(rank, layer, block) for block in range(self._tables[0].size)]
        return np.stack([keys for keys, _ in blocks]), np.stack([values for _, values in blocks])

    def _run(self, ranks: Sequence[int], calls: Sequence[Sequence[Step]]) -> Iterator[list[Outputs]]:
        """calls: the same step of each of these ranks, one after another."""
        pieces: list[dict[str, dict[str, list[Float32]]]] = [{} for _ in ranks]
        wanted: list[list[str]] = [[] for _ in self._plans]
        for place, rank in enumerate(ranks):
            wanted[rank] = [steps[place].name for steps in calls]
        for number in range(len(self._sequences)):
            for batch in self._chunks(number):
                tapped = self._taps.run_ranks_tapped(batch, wanted)
                for own, rank in zip(pieces, ranks, strict=True):
                    for step, outputs in tapped[rank].items():
                        for buffer, values in outputs.items():
                            own.setdefault(step, {}).setdefault(buffer, []).append(values)
        for steps in calls:
            yield [
                {buffer: np.concatenate(parts) for buffer, parts in own.pop(step.name, {}).items()}
                for own, step in zip(pieces, steps, strict=True)
            ]


def longest_sequence(plan: Plan) -> int:
    """Tokens of a sequence that an engine can compute: the last one generated is never fed back."""
    return min(plan.max_positions, plan.limits.max_seq_len - 1)
