"""Scheduled chunks → the arrays of a step, and the results of a step → the requests."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ingot.errors import IngotError, RequestError
from ingot.runtime.request import Request, TokenProbs
from ingot.runtime.sampler import sample_rows
from ingot.step_io import ProbRows, StepBatch, StepResult


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """A batch and what it was made of.

    chunks     tokens of each request, in the batch's order
    row_ends   int per request: end of its rows among the step's R logit rows; they begin where the one before ends
    sampled    requests whose last known token is in the step: each gets the next token
    known      behind them in the draws: (request, row, token) of prompt tokens whose probabilities are wanted
    """

    chunks: Mapping[Request, int]
    row_ends: tuple[int, ...]
    sampled: tuple[Request, ...]
    known: tuple[tuple[Request, int, int], ...]
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
    known: list[tuple[Request, int, int]] = []
    for (request, count), end in zip(chunks.items(), ends, strict=True):
        computed = request.num_computed
        ids.append(request.tokens[computed : computed + count])
        tables.append(request.blocks.ids)
        num_rows = request.logit_rows(count)
        if num_rows:
            rows.extend(range(end - num_rows, end))
        if request.prompt_logprobs is not None:
            known += _known(request, count, len(rows))
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
        sample=sample_rows(sampled, sampled_rows, known),
        want_logits=any(r.rules.processors for r in sampled)
        or (bool(rows) and any(r.want_context_logits or r.want_generation_logits for r in chunks)),
    )
    return ScheduledStep(
        chunks=chunks, row_ends=tuple(row_ends), sampled=tuple(sampled), known=tuple(known), batch=batch
    )


def _known(request: Request, count: int, end: int) -> list[tuple[Request, int, int]]:
    """The rows of a chunk, ending before row `end`, whose next token is a prompt token with a wanted probability."""
    if not request.wants_prompt_rows:
        return []
    after = request.num_computed + count
    first_row, first = end - request.logit_rows(count), after - request.logit_rows(count)
    following = request.tokens[first + 1 : min(after, request.num_prompt - 1) + 1].tolist()
    return [(request, first_row + place, token) for place, token in enumerate(following)]


def count_kinds(chunks: Mapping[Request, int]) -> tuple[int, int]:
    """(prefill tokens, decode rows) of a step. A decode row computes the one token that was generated last."""
    decode_rows = sum(
        count == 1 and request.num_pending == 1 and request.num_generated > 0 for request, count in chunks.items()
    )
    return sum(chunks.values()) - decode_rows, decode_rows


def unfit(step: ScheduledStep, result: StepResult) -> list[tuple[Request, IngotError]]:
    """Requests that cannot go on after this step, each with the reason."""
    if np.isfinite(result.log_probs).all():
        return []
    no_token = "bad_words, logit_bias and min_tokens of this request leave no token to choose"
    no_number = "the model's logits for this request are not finite numbers"
    found: list[tuple[Request, IngotError]] = []
    for request, token, log_prob in zip(step.sampled, result.ids, result.log_probs, strict=False):
        if not np.isfinite(log_prob):
            found.append((request, RequestError(no_token if token < 0 else no_number)))
    sick = np.isnan(result.log_probs[len(step.sampled) :])
    found += [(step.known[place][0], RequestError(no_number)) for place in np.flatnonzero(sick)]
    return found


def keep_results(step: ScheduledStep, result: StepResult) -> None:
    """Copy what requests asked for beside tokens out of the step. Call before the new tokens are appended."""
    begin = 0
    for (request, count), end in zip(step.chunks.items(), step.row_ends, strict=True):
        if result.logits is not None and end > begin:
            rows = result.logits[begin:end]
            if request.want_context_logits and request.wants_prompt_rows:
                request.context_logits.append(rows.copy())
            if request.want_generation_logits and count == request.num_pending:
                request.generation_logits.append(rows[-1].copy())
        if request.wants_prompt_rows:
            request.num_context_logits += end - begin
        begin = end
    probs = step.batch.sample.probs
    if probs is not None:
        for q, request in enumerate(step.sampled):
            if request.logprobs is not None:
                request.token_probs.append(_token_probs(result, probs, q))
        for q, (request, _, _) in enumerate(step.known, start=len(step.sampled)):
            request.prompt_probs.append(_token_probs(result, probs, q))


def _token_probs(result: StepResult, probs: ProbRows, q: int) -> TokenProbs:
    assert result.ranks is not None, "a step with ProbRows has ranks"
    assert result.top_ids is not None
    assert result.top_log_probs is not None
    top = slice(*probs.top_starts[q : q + 2])
    return TokenProbs(
        token=int(result.ids[q]),
        log_prob=float(result.log_probs[q]),
        rank=int(result.ranks[q]),
        top_ids=result.top_ids[top],
        top_log_probs=result.top_log_probs[top],
    )
