"""Scheduled chunks → the arrays of a step, and the results of a step → the requests."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.errors import IngotError, RequestError
from ingot.runtime.request import Request, TokenProbs
from ingot.step_io import LAST_DRAWN, NOT_DRAWN, Int32, KnownTokens, StepBatch, StepResult

_LAST = np.array([LAST_DRAWN], dtype=np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
    """A batch and what it was made of.

    chunks     tokens of each request, in the batch's order
    row_ends   int per request: end of its rows among the step's R logit rows; they begin where the one before ends
    sampled    the requests of all draws. They are those whose last known token is in the step: each gets the next
               token, or several, if drafts follow. First those for which the session draws, then those with logits
               processors
    processed  the rows of logits of the latter
    known      behind them in the results: (request, row, token) of prompt tokens whose probabilities are wanted
    versions   of each request's block table
    keeps      whether anything but tokens is to be kept of its results
    decodes    whether each request was in the step before and computes the one token that it drew there, from which it
               draws again
    drafts     whether drafts are in the step
    """

    chunks: Mapping[Request, int]
    row_ends: tuple[int, ...]
    sampled: tuple[Request, ...]
    processed: tuple[int, ...]
    known: tuple[tuple[Request, int, int], ...]
    versions: tuple[int, ...]
    keeps: bool
    decodes: bool
    batch: StepBatch
    drafts: bool = False

    @property
    def kinds(self) -> tuple[int, int]:
        """(prefill tokens, decode rows), see `count_kinds`."""
        return (0, len(self.chunks)) if self.decodes else count_kinds(self.chunks)


def assemble(chunks: Mapping[Request, int], before: ScheduledStep | None = None) -> ScheduledStep:
    """The step that computes chunks[request] pending tokens of each request, all of which have slots.

    before  the step before: where the same requests decode again, most of it still holds
    """
    requests = tuple(chunks)
    if before is not None and _decode_again(requests, before):
        return _advance(before, chunks)
    counts = np.fromiter(chunks.values(), dtype=np.int32, count=len(chunks))
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = starts[1:].tolist()
    ids = []
    rows: list[int] = []
    row_ends: list[int] = []
    drawn: list[tuple[Request, int]] = []
    processed: dict[Request, int] = {}
    known: list[tuple[Request, int, int]] = []
    for (request, count), end in zip(chunks.items(), ends, strict=True):
        begun = request.num_begun
        decodes = count == request.num_pending == 1 and request.num_generated > 0
        ids.append(_LAST if decodes else request.tokens[begun : begun + count])
        num_rows = request.logit_rows(count)
        if num_rows:
            rows.extend(range(end - num_rows, end))
        if request.prompt_logprobs is not None:
            known += _known(request, count, len(rows))
        row_ends.append(len(rows))
        if count >= request.num_pending and request.rules.processors:
            processed[request] = len(rows) - 1
        elif count >= request.num_pending:
            drawn += [(request, row) for row in range(len(rows) - 1 - request.num_drafted, len(rows))]
    batch = StepBatch(
        ids=np.concatenate(ids),
        query_starts=starts,
        past_lengths=np.array([request.num_begun for request in requests], dtype=np.int32),
        block_tables=_block_tables(requests),
        logit_rows=np.array(rows, dtype=np.int32),
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        draws=np.array([row for _, row in drawn], dtype=np.int32),
        known=_known_tokens(known) if known else None,
        want_logits=bool(processed)
        or (bool(rows) and any(r.want_context_logits or r.want_generation_logits for r in chunks)),
    )
    sampled = (*[request for request, _ in drawn], *processed)
    wants_probs = bool(known) or any(request.logprobs is not None for request in sampled)
    return ScheduledStep(
        chunks=chunks,
        row_ends=tuple(row_ends),
        sampled=sampled,
        processed=tuple(processed.values()),
        known=tuple(known),
        versions=tuple([request.blocks.version for request in requests]),
        keeps=batch.want_logits or wants_probs or any(r.wants_prompt_rows for r in requests),
        decodes=False,
        batch=batch,
        drafts=any([request.num_drafted for request in requests]),
    )


def _decode_again(requests: tuple[Request, ...], before: ScheduledStep) -> bool:
    """Whether a step's requests, which are those of the step before, all compute the one token that they drew there."""
    return (
        requests == before.sampled
        and len(requests) == len(before.chunks)
        and not before.known
        and all([request.num_tokens - request.num_computed == 1 for request in requests])
        and not any([request.num_drafted for request in requests])
    )


def _advance(before: ScheduledStep, chunks: Mapping[Request, int]) -> ScheduledStep:
    """The next step of requests that all decode, and were in the step before: one token and one row each. Steps of this
    kind are most steps of a run, and short where the model is small: hence list comprehensions, and nothing made twice.
    """
    requests, last = tuple(chunks), before.batch
    versions = tuple([request.blocks.version for request in requests])
    one_each = np.arange(len(requests) + 1, dtype=np.int32)
    batch = StepBatch(
        ids=np.full(len(requests), LAST_DRAWN, dtype=np.int32),
        query_starts=one_each,
        past_lengths=np.array([request.num_computed for request in requests], dtype=np.int32),
        block_tables=_tables_after(before, requests, versions),
        logit_rows=one_each[:-1],
        slots=np.array([request.slot for request in requests], dtype=np.int32),
        draws=one_each[: len(requests) - len(before.processed)],
        want_logits=last.want_logits,
    )
    return ScheduledStep(
        chunks=chunks,
        row_ends=tuple(range(1, len(requests) + 1)),
        sampled=requests,
        processed=tuple(range(len(batch.draws), len(requests))),
        known=(),
        versions=versions,
        keeps=before.keeps,
        decodes=True,
        batch=batch,
    )


def follow(before: ScheduledStep, requests: Sequence[Request]) -> ScheduledStep:
    """The step after `before`, whose results are not there yet: each of these requests, which are in it in the same
    order, computes the token that it draws then."""
    if before.decodes and len(requests) == len(before.chunks):
        return _again(before)
    step = _advance(before, dict.fromkeys(requests, 1))
    past = np.array([request.num_tokens for request in requests], dtype=np.int32)
    return dataclasses.replace(step, batch=dataclasses.replace(step.batch, past_lengths=past))


def _again(before: ScheduledStep) -> ScheduledStep:
    """The step after one in which all requests decode, if all of them go on: of its arrays, two change."""
    versions, last = tuple([request.blocks.version for request in before.sampled]), before.batch
    batch = StepBatch(
        ids=last.ids,
        query_starts=last.query_starts,
        past_lengths=last.past_lengths + 1,
        block_tables=_tables_after(before, before.sampled, versions),
        logit_rows=last.logit_rows,
        slots=last.slots,
        draws=last.draws,
        want_logits=last.want_logits,
    )
    return ScheduledStep(
        chunks=before.chunks,
        row_ends=before.row_ends,
        sampled=before.sampled,
        processed=before.processed,
        known=(),
        versions=versions,
        keeps=before.keeps,
        decodes=True,
        batch=batch,
    )


def _block_tables(requests: Sequence[Request]) -> Int32:
    return stack_tables([request.blocks.ids for request in requests])


def stack_tables(tables: Sequence[Int32]) -> Int32:
    """Tables of sequences, each [cache groups, its own width], as [cache groups, sequences, width]."""
    width = max([table.shape[1] for table in tables])
    found = np.full((len(tables[0]), len(tables), width), -1, dtype=np.int32)
    for row, table in enumerate(tables):
        found[:, row, : table.shape[1]] = table
    return found


def _tables_after(before: ScheduledStep, requests: Sequence[Request], versions: tuple[int, ...]) -> Int32:
    """The block tables of a step whose requests are all in `before`."""
    if requests != before.sampled:
        return _block_tables(requests)
    return before.batch.block_tables if versions == before.versions else _changed_tables(before, versions)


def _changed_tables(before: ScheduledStep, versions: tuple[int, ...]) -> Int32:
    """The block tables of `before` with the rows of tables that have changed since."""
    both = enumerate(zip(versions, before.versions, strict=True))
    tables = {row: before.sampled[row].blocks.ids for row, (now, then) in both if now != then}
    kept = before.batch.block_tables
    width = max(kept.shape[2], *[table.shape[1] for table in tables.values()])
    changed = np.full((*kept.shape[:2], width), -1, dtype=np.int32)
    changed[..., : kept.shape[2]] = kept
    for row, table in tables.items():
        own = table.shape[1]
        changed[:, row, :own] = table
        changed[:, row, own:] = -1
    return changed


def _known(request: Request, count: int, end: int) -> list[tuple[Request, int, int]]:
    """The rows of a chunk, ending before row `end`, whose next token is a prompt token with a wanted probability."""
    if not request.wants_prompt_rows:
        return []
    after = request.num_begun + count
    first_row, first = end - request.logit_rows(count), after - request.logit_rows(count)
    following = request.tokens[first + 1 : min(after, request.num_prompt - 1) + 1].tolist()
    return [(request, first_row + place, token) for place, token in enumerate(following)]


def _known_tokens(known: Sequence[tuple[Request, int, int]]) -> KnownTokens:
    return KnownTokens(
        row=np.array([row for _, row, _ in known], dtype=np.int32),
        token=np.array([token for _, _, token in known], dtype=np.int32),
        top=np.array([request.prompt_logprobs for request, _, _ in known], dtype=np.int32),
    )


def count_kinds(chunks: Mapping[Request, int]) -> tuple[int, int]:
    """(prefill tokens, decode rows) of a step. Decode rows compute the token that was generated last, and drafts."""
    decode_rows = sum(
        [
            count
            for request, count in chunks.items()
            if count == 1 + request.num_drafted and request.num_prompt < request.num_tokens == request.num_computed + 1
        ]
    )
    return sum(chunks.values()) - decode_rows, decode_rows


def wrong_drafts(step: ScheduledStep, result: StepResult) -> dict[Request, int]:
    """How many drafts came to nothing, of each request that has some in the step."""
    wrong = {request: 0 for request in step.chunks if request.num_drafted} if step.drafts else {}
    if wrong:
        for request, token in zip(step.sampled, result.ids[-1].tolist(), strict=False):
            if token == NOT_DRAWN:
                wrong[request] += 1
    return wrong


def failed_requests(step: ScheduledStep, result: StepResult) -> list[tuple[Request, IngotError]]:
    """Requests that cannot go on after this step, each with the reason."""
    if np.isfinite(result.log_probs).all():
        return []
    no_token = "bad_words, logit_bias, min_tokens and penalties of this request leave no token to choose"
    with_grammar = "structured_outputs and bans of this request leave no token to choose"
    no_number = "the model's logits for this request are not finite numbers"
    found: list[tuple[Request, IngotError]] = []
    log_probs = result.log_probs[-1]
    for request, token, log_prob in zip(step.sampled, result.ids[-1], log_probs, strict=False):
        if not np.isfinite(log_prob):
            if token >= 0 or request.grammar is None:
                found.append((request, RequestError(no_token if token < 0 else no_number)))
            else:
                found.append((request, RequestError(with_grammar, got=request.grammar.error)))
    sick = np.isnan(log_probs[len(step.sampled) :])
    found += [(step.known[place][0], RequestError(no_number)) for place in np.flatnonzero(sick)]
    return found


def catch_up(step: ScheduledStep, result: StepResult) -> None:
    """Give the requests what all steps but the last brought."""
    before = len(result.ids) - 1
    if not before:
        return
    if result.token_ranks is not None:
        for number in range(before):
            for request, own in zip(step.sampled, token_probs(step, result, number), strict=True):
                if request.logprobs is not None:
                    request.token_probs.append(own)
    tokens, log_probs = result.ids[:before].T, result.log_probs[:before].T.tolist()
    for request, own_tokens, own_log_probs in zip(step.sampled, tokens, log_probs, strict=True):
        request.catch_up(own_tokens, own_log_probs)


def keep_results(step: ScheduledStep, result: StepResult) -> None:
    """Copy what requests asked for beside tokens out of the last step. Call before its tokens are appended."""
    if not step.keeps:
        return
    wrong = wrong_drafts(step, result)
    begin = 0
    for (request, count), end in zip(step.chunks.items(), step.row_ends, strict=True):
        if result.logits is not None and end > begin:
            rows = result.logits[begin:end]
            if request.want_context_logits and request.wants_prompt_rows:
                request.context_logits.append(rows.copy())
            if request.want_generation_logits and request.num_computed + count >= request.num_tokens:
                draws = rows[len(rows) - 1 - request.num_drafted : len(rows) - wrong.get(request, 0)]
                request.generation_logits += [row.copy() for row in draws]
        if request.wants_prompt_rows:
            request.num_context_logits += end - begin
        begin = end
    if result.token_ranks is None:
        return
    probs = iter(token_probs(step, result, -1))
    for request, own in zip(step.sampled, probs, strict=False):
        if request.logprobs is not None and not request.finished and own.token != NOT_DRAWN:
            request.token_probs.append(own)
    for (request, _, _), own in zip(step.known, probs, strict=True):
        request.prompt_probs.append(own)


def tops(step: ScheduledStep) -> list[int]:
    """How many of the most likely tokens each draw and each known token wants."""
    return [r.logprobs or 0 for r in step.sampled] + [r.prompt_logprobs or 0 for r, _, _ in step.known]


def token_probs(step: ScheduledStep, result: StepResult, number: int) -> list[TokenProbs]:
    """Probabilities of every draw and known token of one of the steps."""
    assert result.token_ranks is not None, "somebody wants probabilities"
    assert result.top_ids is not None
    assert result.top_log_probs is not None
    top_ids, top_log_probs = result.top_ids[number], result.top_log_probs[number]
    found: list[TokenProbs] = []
    begin = 0
    columns = (array[number].tolist() for array in (result.ids, result.log_probs, result.token_ranks))
    for token, log_prob, rank, top in zip(*columns, tops(step), strict=True):
        own = slice(begin, begin + top)
        begin += top
        found.append(
            TokenProbs(
                token=token, log_prob=log_prob, rank=rank, top_ids=top_ids[own], top_log_probs=top_log_probs[own]
            )
        )
    return found
