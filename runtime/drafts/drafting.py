"""Speculative decoding: the steps of requests that decode get drafts, as many as are likely to pay.

    tokens of a request   ... t7 │ d1 d2 d3     the step computes t7 and three drafts, and draws from all four rows
    draws                        │ d1 d2 x      two drafts were right: the request gets three tokens
    next step               ... t7 d1 d2 x

A draft is right if it is what the draw before it gives, whatever the rules of the request. So tokens do not depend on
drafts, sampled ones neither: drafts change only how many steps there are.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

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
_LOG = logging.getLogger("ingot.runtime")


class Drafting:
    """For one step loop, with the drafts that `drafter` makes."""

    def __init__(self, drafter: Drafter, most: int, limits: Limits, blocks: BlockManager) -> None:
        """most: drafts that a request may have in a step."""
        self._drafter, self._most, self._blocks = drafter, most, blocks
        self._rows = min(limits.max_num_tokens, limits.max_logit_rows)
        self._times, self._common = RowTimes(), Odds()
        self._odds: dict[Request, Odds] = {}
        self._matched: dict[Request, int] = {}  # of the drafts in the step that runs

    def extend(self, chunks: dict[Request, int]) -> None:
        """Add drafts to a step in which every request decodes, where that is likely to make tokens come faster.
        Reserves their blocks."""
        self._matched = {}
        if not self._times.knows(len(chunks)) or not all([_decodes(request) for request in chunks]):
            return
        gains: dict[Request, Sequence[float]] = {}
        for request in chunks:
            count, matched = self._match(request)
            if count:
                self._matched[request] = matched
                gains[request] = self._odds.setdefault(request, Odds(self._common)).gains(matched, count)
        counts = self._chosen(gains, len(chunks))
        for request in gains.keys() - counts.keys():
            self._odds[request].rest(self._matched[request])
        reserved = {
            request: count
            for request, count in counts.items()
            if self._blocks.reserve([(request.blocks, request.num_tokens + count)])
        }
        for request, drafts in self._make(reserved).items() if reserved else ():
            request.draft(drafts)
            chunks[request] = 1 + len(drafts)

    def learn(self, outcomes: Sequence[Outcome], seconds: float) -> tuple[int, int]:
        """From a step that took `seconds`, before its results move anybody forward. How many drafts it had, and how
        many of them were right."""
        step, result = outcomes[0] if len(outcomes) == 1 else (None, None)
        if step is None or not isinstance(result, StepResult):  # it was repeated in parts, or failed
            return 0, 0
        wrong, (prefill_tokens, rows) = wrong_drafts(step, result), step.kinds
        if not prefill_tokens:
            self._times.observe(rows, seconds)
        for request, count in wrong.items():
            drafted = request.num_drafted
            self._odds[request].learn(self._matched[request], drafted, drafted - count)
        drafted = sum(request.num_drafted for request in wrong)
        return drafted, drafted - sum(wrong.values())

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._odds.pop(request, None)
        self._matched.pop(request, None)
        self._drafter.forget(request)

    def close(self) -> None:
        """No step follows."""
        self._drafter.close()

    def _make(self, counts: Mapping[Request, int]) -> Mapping[Request, Int32]:
        """Requests go on without drafts where the drafter fails."""
        try:
            return self._drafter.make(counts)
        except Exception as error:
            _LOG.warning("drafts cannot be made; requests go on without drafts: %r", error)
            self._most = 0
            return {}

    def _match(self, request: Request) -> tuple[int, int]:
        most = min(self._most, request.most_drafts)
        return self._drafter.match(request, most) if most > 0 else (0, 0)

    def _chosen(self, gains: Mapping[Request, Sequence[float]], decoding: int) -> dict[Request, int]:
        """How many drafts each request gets: the choice with the most expected tokens per second, of as many rows and
        as deep drafts as that takes. The drafts that are most likely right come first."""
        # a draft is never likelier than the one before it, so the first so many of this order are heads of all drafts
        numbered = enumerate(gains.values())
        order = sorted((-gain, place, number) for number, own in numbered for place, gain in enumerate(own))
        best, found = _LEAST_GAIN * decoding / self._times.predict(decoding), order[:0]
        for depth in range(1, max(map(len, gains.values()), default=0) + 1):
            drafts = [each for each in order if each[1] < depth][: self._rows - decoding]
            tokens, before = float(decoding), self._drafter.seconds(len(gains), depth)
            for count, (loss, _, _) in enumerate(drafts, 1):
                tokens -= loss
                if (speed := tokens / (before + self._times.predict(decoding + count))) > best:
                    best, found = speed, drafts[:count]
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
    return Drafting(drafter, speculation.num_speculative_tokens, loaded.limits, blocks)


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
