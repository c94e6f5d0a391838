"""Scheduled chunks → the arrays of a step, and the results of a step → the requests."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ingot.runtime.request import Request
from ingot.runtime.sampler import sample_rows
from ingot.step_io import StepBatch, StepResult


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """A batch and what it was made of.

    chunks     tokens of each request, in the batch's order
    row_ends   int per request: end of its rows among the step's R logit rows; they begin where the one before ends
    sampled    requests whose last known token is in the step: each gets the next token
    """

    chunks: Mapping[Request, int]
    row_ends: tuple[int, ...]
    sampled: tuple[Request, ...]
    batch: StepBatch


def assemble(chunks: Mapping[Request, int]) -> ScheduledStep:
    """The step that computes chunks[request] pending tokens of each request."""
    counts = np.fromiter(chunks.values(), dtype=np.int32, count=len(chunks))
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = starts[1:].tolist()
    ids, tables = [], []
    rows: list[int] = []
    row_ends, sampled, sampled_rows = [], [], []
    for (request, count), end in zip(chunks.items(), ends, strict=True):
        computed = request.num_computed
        ids.append(request.tokens[computed : computed + count])
        tables.append(request.blocks.ids)
        rows.extend(range(end - request.logit_rows(count), end))
        row_ends.append(len(rows))
        if count == request.num_pending:
            sampled.append(request)
            sampled_rows.append(len(rows) - 1)
    block_tables = np.full((len(chunks), max(len(table) for table in tables)), -1, dtype=np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    batch = StepBatch(
        ids=np.concatenate(ids),
        query_starts=starts,
        past_lengths=np.array([request.num_computed for request in chunks], dtype=np.int32),
        block_tables=block_tables,
        logit_rows=np.array(rows, dtype=np.int32),
        sample=sample_rows(sampled, sampled_rows),
        want_logits=bool(rows) and any(r.want_context_logits or r.want_generation_logits for r in chunks),
    )
    return ScheduledStep(chunks=chunks, row_ends=tuple(row_ends), sampled=tuple(sampled), batch=batch)


def count_kinds(chunks: Mapping[Request, int]) -> tuple[int, int]:
    """(prefill tokens, decode rows) of a step. A decode row computes the one token that was generated last."""
    decode_rows = sum(
        count == 1 and request.num_pending == 1 and request.num_generated > 0 for request, count in chunks.items()
    )
    return sum(chunks.values()) - decode_rows, decode_rows


def keep_logits(step: ScheduledStep, result: StepResult) -> None:
    """Copy the logits that requests asked for out of the step. Call before the new tokens are appended."""
    if result.logits is None:
        return
    begin = 0
    for (request, count), end in zip(step.chunks.items(), step.row_ends, strict=True):
        rows = result.logits[begin:end]
        begin = end
        if not len(rows):
            continue
        if request.want_context_logits and request.num_context_logits < request.num_prompt:
            request.context_logits.append(rows.copy())
            request.num_context_logits += len(rows)
        if request.want_generation_logits and count == request.num_pending:
            request.generation_logits.append(rows[-1].copy())
