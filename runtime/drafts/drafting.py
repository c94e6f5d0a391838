"""Speculative decoding: the steps of requests that decode get drafts, as many as are likely to pay.

    tokens of a request   ... t7 │ d1 d2 d3     the step computes t7 and three drafts, and draws from all four rows
    draws                        │ d1 d2 x      two drafts were right: the request gets three tokens
    next step               ... t7 d1 d2 x

A draft is right if it is what the draw before it gives, whatever the rules of the request. So tokens do not depend on
drafts, sampled ones neither: drafts change only how many steps there are.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.configs.runtime import RuntimeConfig
from ingot.errors import UsageError
from ingot.manifest import DRAFT
from ingot.plan import Limits
from ingot.runtime.block_manager import BlockManager
from ingot.runtime.drafts.draft_model import open_draft_model
from ingot.runtime.drafts.drafter import Drafter
from ingot.runtime.drafts.lookup import Lookup
from ingot.runtime.drafts.odds import Odds
from ingot.runtime.drafts.row_times import RowTimes
from ingot.runtime.request import Request
from ingot.runtime.run_step import Outcome
from ingot.runtime.session import LoadedEngine
from ingot.runtime.step_batch import wrong_drafts
from ingot.step_io import Int32, PipelineSession, Session, StepResult

_LEAST_GAIN = 1.02  # times as many tokens per second as without drafts: less is lost in what is not counted
_FORCED = (0.95,)  # of what a grammar forces: other tokens may write the same text
_LOG = logging.getLogger("ingot.runtime")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """Drafts that a request may have.

    odds, matched  how likely they are right
    gains          of each, how likely it and all before it are right
    forced         those of a grammar that leaves no other text; None: the drafter makes them
    """

    odds: Odds
    matched: int
    gains: Sequence[float]
    forced: Int32 | None = None


class Drafting:
    """For one step loop, with the drafts that `drafter` makes."""

    def __init__(
        self, drafter: Drafter, most: int, limits: Limits, blocks: BlockManager, most_seconds: float = math.inf
    ) -> None:
        """most: drafts that a request may have in a step. most_seconds: of a step with drafts, and of making them."""
        self._drafter, self._most, self._blocks, self._most_seconds = drafter, most, blocks, most_seconds
        self._rows = min(limits.max_num_tokens, limits.max_logit_rows)
        self._times, self._common = RowTimes(), Odds()
        self._odds: dict[Request, Odds] = {}
        self._of_grammars = Odds(first_guess=_FORCED)
        self._offers: dict[Request, _Offer] = {}  # of the step that is made or runs

    def extend(self, chunks: dict[Request, int]) -> bool:
        """Add drafts to a step in which every request decodes, where that is likely to make tokens come faster.
        Reserves their blocks. Whether there are any."""
        self._offers = {}
        if not self._times.knows(len(chunks)) or not all([_decodes(request) for request in chunks]):
            return False
        if not self._may_pay(len(chunks)):
            return False
        for request in chunks:
            if (offer := self._offer(request)) is not None:
                self._offers[request] = offer
        counts = self._chosen({request: offer.gains for request, offer in self._offers.items()}, len(chunks))
        for request in self._offers.keys() - counts.keys():
            self._offers[request].odds.rest(self._offers[request].matched)
        reserved = {
            request: count
            for request, count in counts.items()
            if self._blocks.reserve([(request.blocks, request.num_tokens + count)])
        }
        for request, drafts in self._make(reserved).items() if reserved else ():
            request.draft(drafts)
            chunks[request] = 1 + len(drafts)
        return bool(reserved)

    def learn(self, outcomes: Sequence[Outcome], seconds: float) -> tuple[int, int]:
        """From steps that took `seconds`, before their results move anybody forward. How many drafts they had, and how
        many of them were right."""
        step, result = outcomes[0] if len(outcomes) == 1 else (None, None)
        if step is None or not isinstance(result, StepResult):  # it was repeated in parts, or failed
            return 0, 0
        wrong, (prefill_tokens, rows) = wrong_drafts(step, result), step.kinds
        if not prefill_tokens:
            self._times.observe(rows, seconds / len(result.ids))
        for request, count in wrong.items():
            drafted = request.num_drafted
            self._offers[request].odds.learn(self._offers[request].matched, drafted, drafted - count)
        drafted = sum(request.num_drafted for request in wrong)
        return drafted, drafted - sum(wrong.values())

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._odds.pop(request, None)
        self._offers.pop(request, None)
        self._drafter.forget(request)

    def close(self) -> None:
        """No step follows."""
        self._drafter.close()

    def _may_pay(self, decoding: int) -> bool:
        """Whether a draft that is surely right makes tokens come faster."""
        return self._times.predict(decoding + 1) * decoding < self._times.predict(decoding) * (decoding + 1)

    def _make(self, counts: Mapping[Request, int]) -> Mapping[Request, Int32]:
        """Requests go on without drafts where the drafter fails."""
        forced = {request: self._offers[request].forced for request in counts}
        made = {request: drafts[: counts[request]] for request, drafts in forced.items() if drafts is not None}
        try:
            others = self._drafter.make({request: counts[request] for request in counts.keys() - made.keys()})
        except Exception as error:
            _LOG.warning("drafts cannot be made; requests go on without drafts: %r", error)
            self._most, others = 0, {}
        for request, drafts in others.items():
            made[request] = drafts if request.grammar is None else drafts[: request.grammar.fitting(drafts)]
        return made

    def _offer(self, request: Request) -> _Offer | None:
        """What its grammar forces comes first."""
        most = min(self._most, request.most_drafts)
        if most < 1:
            return None
        if request.grammar is not None and (forced := request.grammar.forced(most)):
            gains = self._of_grammars.gains(1, len(forced))
            return _Offer(odds=self._of_grammars, matched=1, gains=gains, forced=np.array(forced, np.int32))
        count, matched = self._drafter.match(request, most)
        if not count:
            return None
        odds = self._odds.setdefault(request, Odds(self._common))
        return _Offer(odds=odds, matched=matched, gains=odds.gains(matched, count))

    def _chosen(self, gains: Mapping[Request, Sequence[float]], decoding: int) -> dict[Request, int]:
        """How many drafts each request gets: the choice with the most expected tokens per second, of as many rows and
        as deep drafts as that takes. The drafts that are most likely right come first."""
        # a draft is never likelier than the one before it, so the first so many of this order are heads of all drafts
        numbered = enumerate(gains.values())
        order = sorted((-gain, place, number) for number, own in numbered for place, gain in enumerate(own))
        best, found = _LEAST_GAIN * decoding / self._times.predict(decoding), order[:0]
        for depth in range(1, max(map(len, gains.values()), default=0) + 1):
            room = min(self._rows, self._times.most_rows) - decoding
            drafts = [each for each in order if each[1] < depth][: max(room, 0)]
            tokens, before = float(decoding), self._drafter.seconds(len(gains), depth)
            for count, (loss, _, _) in enumerate(drafts, 1):
                tokens -= loss
                seconds = before + self._times.predict(decoding + count)
                if seconds <= self._most_seconds and tokens / seconds > best:
                    best, found = tokens / seconds, drafts[:count]
        requests = list(gains)
        chosen: dict[Request, int] = {}
        for _, _, number in found:
            chosen[requests[number]] = chosen.get(requests[number], 0) + 1
        return chosen


def _decodes(request: Request) -> bool:
    return request.num_tokens - request.num_computed == 1 and request.num_tokens > request.num_prompt


def drafting_for(loaded: LoadedEngine, config: RuntimeConfig, blocks: BlockManager) -> Drafting | None:
    """What `config` asks for; None: no drafts. Raises UsageError where there can be none, and what `open_draft_model`
    raises."""
    speculation, engine = config.speculation, loaded.engine
    if speculation is None:
        return None
    check_session(loaded.session, engine.manifest.target, blocks)
    drafter: Drafter = Lookup(speculation)
    if speculation.method == "draft_model":
        directory = engine.directory / DRAFT if speculation.model is None else Path(speculation.model)
        drafter = open_draft_model(directory, config, engine.plan.vocab_size)
    most_seconds = math.inf if config.tpot_target is None else config.tpot_target / 1e3
    return Drafting(drafter, speculation.num_speculative_tokens, loaded.limits, blocks, most_seconds)


def check_session(session: Session, target: str, blocks: BlockManager) -> None:
    """Raises UsageError where no step of a session can have drafts."""
    reason = None
    if not session.takes_drafts:
        reason = f"{target} computes no drafts: CPU targets do, and ref"
    elif blocks.keeps_states:
        reason = "the model keeps states, which cannot go back behind a wrong draft"
    elif isinstance(session, PipelineSession) and session.stages > 1:
        reason = "an engine with --pp_size computes no drafts: build it with --pp_size 1"
    if reason is not None:
        raise UsageError(f"speculative_config: {reason}", hint="leave speculative_config out")
