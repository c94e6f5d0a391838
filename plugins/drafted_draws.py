"""Draws of sequences whose last tokens in a step are drafts: from the rows of several tokens, as in steps of their own.

    tokens of the step   t5   d1   d2   d3
    draws                d1   d2   x    NOT_DRAWN     d3 was wrong: what is drawn behind it counts for nothing

`sequences.py` says what a sequence is.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from ingot.errors import RequestError
from ingot.plugins.ops.sample import Draw, Drawn
from ingot.step_io import NO_LOG_PROB, NOT_DRAWN, Ending, Int32, StepBatch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DraftedRun:
    """The draws of one sequence.

    slot    where it is
    place   of its first draw among all draws of the step
    rows    of logits, one for each draw
    drafts  the tokens of all rows but the first
    """

    slot: int
    place: int
    rows: Sequence[int]
    drafts: Sequence[int]


def drafted_runs(batch: StepBatch, slots: Int32) -> list[DraftedRun]:
    """The draws of a step by sequences; no runs where no sequence has several. slots: int32 [Q], of each draw.

    Raises RequestError where the draws of a sequence are not from the rows of its last tokens.
    """
    if len(set(slots.tolist())) == len(slots):
        return []
    begins = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), len(slots)]
    runs = []
    for begin, end in itertools.pairwise(begins):
        rows = batch.draws[begin:end]
        tokens = batch.logit_rows[rows]
        if end - begin > 1:
            after = int(batch.query_starts[np.searchsorted(batch.query_starts, tokens[0], side="right")])
            if not np.array_equal(rows, rows[0] + np.arange(end - begin)) or not np.array_equal(
                tokens, after + np.arange(begin - end, 0)
            ):
                raise RequestError(
                    "a sequence draws from the rows of its last tokens, in order", got=f"rows {rows.tolist()}"
                )
        drafts = batch.ids[tokens[1:]].tolist()
        runs.append(DraftedRun(slot=int(slots[begin]), place=begin, rows=rows.tolist(), drafts=drafts))
    if len({run.slot for run in runs}) < len(runs):
        raise RequestError("the draws of a sequence are neighbours", got=f"slots {slots.tolist()}")
    return runs


def draws_of(
    run: DraftedRun, next_draw: Callable[[int], Draw], assume: Callable[[int], None], most_tokens: int, reasons: bool
) -> list[Draw]:
    """The draws of one sequence.

    next_draw    gives the draw from a row, behind what the sequence has
    assume       adds a token that the sequence may not get
    most_tokens  that the sequence may still get
    reasons      whether its rules have a reasoning part
    Raises RequestError where it may not have these drafts.
    """
    if run.drafts and reasons:
        raise RequestError("a sequence with a reasoning part draws from one row")
    if len(run.rows) > max(most_tokens, 1):
        raise RequestError(
            "a sequence has more drafts than tokens that it may still get",
            expected=f"at most {max(most_tokens, 1)} draws",
            got=str(len(run.rows)),
        )
    draws = [next_draw(run.rows[0])]
    for draft, row in zip(run.drafts, run.rows[1:], strict=True):
        assume(draft)
        draws.append(next_draw(row))
    return draws


def keep_counted(
    runs: Sequence[DraftedRun], drawn: Drawn, append: Callable[[int, int, float], Ending]
) -> tuple[Drawn, Int32]:
    """What counts of the draws of a step, and the Ending behind each. append: adds a token, with its log probability,
    to the sequence in a slot.

    A draw behind a draft that fails counts for nothing: it fails again when it is the first one.
    """
    ids, log_probs = drawn.ids.copy(), drawn.log_probs.copy()
    ranks = None if drawn.token_ranks is None else drawn.token_ranks.copy()
    ends = np.zeros(sum(len(run.rows) for run in runs), np.int32)
    for run in runs:
        counts = True
        for number in range(len(run.rows)):
            place = run.place + number
            token, log_prob = int(ids[place]), float(log_probs[place])
            if number:
                right = int(ids[place - 1]) == run.drafts[number - 1] and ends[place - 1] == Ending.NONE
                counts = counts and right and token >= 0 and bool(np.isfinite(log_prob))
            if counts:
                ends[place] = append(run.slot, token, log_prob)
            else:
                ids[place], log_probs[place] = NOT_DRAWN, NO_LOG_PROB
                if ranks is not None:
                    ranks[place] = 0
    return dataclasses.replace(drawn, ids=ids, log_probs=log_probs, token_ranks=ranks), ends
