"""Scheduled chunks → the arrays of a step, and the results of a step → the requests."""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from ingot.errors import IngotError, RequestError
from ingot.runtime.request import Request, TokenProbs
from ingot.runtime.sampler import next_draws, sample_rows
from ingot.step_io import Int32, StepBatch, StepResult


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """A batch and what it was made of.

    chunks     tokens of each request, in the batch's order
    row_ends   int per request: end of its rows among the step's R logit rows; they begin where the one before ends
    sampled    requests whose last known token is in the step: each gets the next token
    known      behind them in the draws: (request, row, token) of prompt tokens whose probabilities are wanted
    versions   of each request's block table
    keeps      whether anything but tokens is to be kept of its results
    """

    chunks: Mapping[Request, int]
    row_ends: tuple[int, ...]
    sampled: tuple[Request, ...]
    known: tuple[tuple[Request, int, int], ...]
    versions: tuple[int, ...]
    keeps: bool
    batch: StepBatch


def assemble(chunks: Mapping[Request, int], before: ScheduledStep | None = None) -> ScheduledStep:
    """The step that computes chunks[request] pending tokens of each request.

    before  the step before: where the same requests decode again, most of it still holds
    """
    requests = tuple(chunks)
    if (
        before is not None
        and requests == before.sampled
        and len(requests) == len(before.chunks)
        and not before.known
        and all([request.num_tokens - request.num_computed == 1 for request in requests])
    ):
        return _advance(before, chunks)
    counts = np.fromiter(chunks.values(), dtype=np.int32, count=len(chunks))
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = starts[1:].tolist()
    ids = []
    rows: list[int] = []
    row_ends, sampled, sampled_rows = [], [], []
    known: list[tuple[Request, int, int]] = []
    for (request, count), end in zip(chunks.items(), ends, strict=True):
        computed = request.num_computed
        ids.append(request.tokens[computed : computed + count])
        num_rows = request.logit_rows(count)
        if num_rows:
            rows.extend(range(end - num_rows, end))
        if request.prompt_logprobs is not None:
            known += _known(request, count, len(rows))
        row_ends.append(len(rows))
        if count == request.num_pending:
            sampled.append(request)
            sampled_rows.append(len(rows) - 1)
    tables = [request.blocks.ids for request in requests]
    width = max([table.shape[1] for table in tables])
    block_tables = np.full((len(tables[0]), len(tables), width), -1, dtype=np.int32)
    for row, table in enumerate(tables):
        block_tables[:, row, : table.shape[1]] = table
    versions = tuple([request.blocks.version for request in requests])
    batch = StepBatch(
        ids=np.concatenate(ids),
        query_starts=starts,
        past_lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
        block_tables=block_tables,
        logit_rows=np.array(rows, dtype=np.int32),
        sample=sample_rows(sampled, sampled_rows, known),
        want_logits=any(r.rules.processors for r in sampled)
        or (bool(rows) and any(r.want_context_logits or r.want_generation_logits for r in chunks)),
    )
    keeps = batch.want_logits or batch.sample.probs is not None or any(r.wants_prompt_rows for r in requests)
    return ScheduledStep(
        chunks=chunks,
        row_ends=tuple(row_ends),
        sampled=tuple(sampled),
        known=tuple(known),
        versions=versions,
        keeps=keeps,
        batch=batch,
    )


def _advance(before: ScheduledStep, chunks: Mapping[Request, int]) -> ScheduledStep:
    """The next step of requests that all decode: one token and one row each, in the same order. Steps of this kind are
    most steps of a run, and short where the model is small: hence list comprehensions, and nothing made twice.
    """
    requests, last = before.sampled, before.batch
    versions = tuple([request.blocks.version for request in requests])
    past = [request.num_computed for request in requests]
    past_lengths = np.array(past, dtype=np.int32)
    one_each = np.arange(len(requests) + 1, dtype=np.int32)
    batch = StepBatch(
        ids=np.array([request.tokens[place] for request, place in zip(requests, past, strict=True)], dtype=np.int32),
        query_starts=one_each,
        past_lengths=past_lengths,
        block_tables=last.block_tables if versions == before.versions else _changed_tables(before, versions),
        logit_rows=one_each[:-1],
        sample=next_draws(last.sample, requests, one_each[:-1]),
        want_logits=last.want_logits,
    )
    return ScheduledStep(
        chunks=chunks,
        row_ends=tuple(range(1, len(requests) + 1)),
        sampled=requests,
        known=(),
        versions=versions,
        keeps=before.keeps,
        batch=batch,
    )


def _changed_tables(before: ScheduledStep, versions: tuple[int, ...]) -> Int32:
    """The block tables of `before` with the rows of tables that have changed since."""
    tables = [request.blocks.ids for request in before.sampled]
    width = max([table.shape[1] for table in tables])
    kept = before.batch.block_tables[..., :width]
    changed = np.full((*kept.shape[:2], width), -1, dtype=np.int32)
    changed[..., : kept.shape[2]] = kept
    for row, (now, then) in enumerate(zip(versions, before.versions, strict=True)):
        if now != then:
            own = tables[row].shape[1]
            changed[:, row, :own] = tables[row]
            changed[:, row, own:] = -1
    return changed


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
    decode_rows = sum([count == 1 and r.num_prompt < r.num_tokens == r.num_computed + 1 for r, count in chunks.items()])
    return sum(chunks.values()) - decode_rows, decode_rows


def unfit(step: ScheduledStep, result: StepResult) -> list[tuple[Request, IngotError]]:
    """Requests that cannot go on after this step, each with the reason."""
    if np.isfinite(result.log_probs).all():
        return []
    no_token = "bad_words, logit_bias, min_tokens and penalties of this request leave no token to choose"
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
    if not step.keeps:
        return
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
    if step.batch.sample.probs is None:
        return
    probs = iter(token_probs(step, result))
    for request, own in zip(step.sampled, probs, strict=False):
        if request.logprobs is not None:
            request.token_probs.append(own)
    for (request, _, _), own in zip(step.known, probs, strict=True):
        request.prompt_probs.append(own)


def token_probs(step: ScheduledStep, result: StepResult) -> list[TokenProbs]:
    """Of every draw of a step with `ProbRows`."""
    assert step.batch.sample.probs is not None, "somebody wants probabilities"
    assert result.ranks is not None, "a step with ProbRows has ranks"
    assert result.top_ids is not None
    assert result.top_log_probs is not None
    top_ids, top_log_probs = result.top_ids, result.top_log_probs
    places = itertools.pairwise(step.batch.sample.probs.top_starts.tolist())
    drawn = zip(result.ids.tolist(), result.log_probs.tolist(), result.ranks.tolist(), places, strict=True)
    return [
        TokenProbs(
            token=token,
            log_prob=log_prob,
            rank=rank,
            top_ids=top_ids[begin:end],
            top_log_probs=top_log_probs[begin:end],
        )
        for token, log_prob, rank, (begin, end) in drawn
    ]
