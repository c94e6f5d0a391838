"""One request: what was asked, how far it has come, what came out. The scheduler moves it, the step loop fills it.

                    num_prompt                 num_tokens            capacity
    tokens ┌────────────┬─────────────────────────┬─────────────────────┐
           │   prompt   │        generated        │   not yet known     │
           └────────────┴─────────────────────────┴─────────────────────┘
           ├── in the KV cache ──┤├ under way ┤├─── pending ───┤├─ drafted ─┤
           0                num_computed   num_begun         num_tokens

A step computes some pending tokens. When none is left, the logits of the last one give the next token. There is no
prefill or decode state: a decoding request is one with a single pending token. Tokens are under way where pipeline
stages compute several steps at once: then the chunks of a long prompt follow each other. Drafted tokens are guesses,
which a step computes behind the pending token (`drafts/drafting.py`).
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.errors import IngotError, RequestError
from ingot.runtime.block_table import BlockTable
from ingot.runtime.guided.matcher import Matcher
from ingot.runtime.logits_rules import NO_RULES, Rules
from ingot.step_io import Ending, Float32, Int32

PRIORITY_STEP = 256  # requests that may overtake, per level of priority
MAX_PRIORITY = 1000  # either way


class FinishReason(enum.Enum):
    """LENGTH: a limit was reached; STOP: an end token or a stop word; ABORT: somebody wanted no more of it."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


_REASONS: Mapping[int, FinishReason] = {Ending.STOP: FinishReason.STOP, Ending.LENGTH: FinishReason.LENGTH}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenProbs:
    """log_prob and rank (1 is the most likely) of one token, and the most likely ones at its place, best first."""

    token: int
    log_prob: float
    rank: int
    top_ids: Int32
    top_log_probs: Float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningRules:
    """The part of a sequence before its answer: see step_io.SequenceRules."""

    end: tuple[int, ...] = ()
    begin: int | None = None
    budget: int | None = None


NO_REASONING = ReasoningRules()


class Request:
    """prompt int32 [num_prompt]; everything else by name.

    temperature, top_k, top_p, seed  see step_io.SequenceRules
    rules                    what else bears on its draws
    logprobs                 how many of the likeliest tokens are wanted at each generated place; None: not even one
    prompt_logprobs          the same for the tokens of the prompt
    end_ids                  tokens that end it (the token itself is kept)
    stop_words               token sequences that end it (kept too)
    grammar                  of its generated tokens, in a state of its own; None: any
    reasoning                before its grammar begins, or up to a budget
    cache_salt               only requests with the same salt share blocks
    resumed                  tokens that another server has generated already: it goes on behind them, as after a
                             preemption
    priority                 lower goes first. A level is worth a head start of PRIORITY_STEP arrivals and no more, so
                             that everybody's turn comes
    arrival                  order of arrival, set by the step loop; smaller is older
    slot                     where the session holds it; None: nowhere
    follows_tokens           then: whether its next draw cannot begin before its last token is known, see SequenceRules
    started                  when it first took part in a step, time.monotonic(); None before
    num_under_way            tokens in steps that have been announced and not run; 0 between steps without stages
    num_drafted              drafts in the step that is made or runs; 0 between steps
    num_cached               prompt tokens that the prefix cache gave then; None before
    num_lost                 tokens that were in the KV cache when it was preempted last
    context_logits           pieces of float32 [n, vocab], in order, where wanted
    log_probs                one per token generated here; NO_LOG_PROB where it may be left out (`want_log_probs`) and
                             was
    generation_logits        one float32 [vocab] per token generated here, where wanted
    token_probs              one per token generated here, where wanted
    prompt_probs             one per prompt token but the first, where wanted
    error                    why it failed, or who ended it; then finish_reason is ABORT
    """

    def __init__(
        self,
        prompt: Int32,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        rules: Rules = NO_RULES,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        end_ids: frozenset[int] = frozenset(),
        stop_words: Sequence[tuple[int, ...]] = (),
        grammar: Matcher | None = None,
        reasoning: ReasoningRules = NO_REASONING,
        want_context_logits: bool = False,
        want_generation_logits: bool = False,
        want_log_probs: bool = True,
        cache_salt: bytes = b"",
        priority: int = 0,
        resumed: Sequence[int] | Int32 = (),
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed
        self.rules, self.logprobs, self.prompt_logprobs = rules, logprobs, prompt_logprobs
        self.end_ids, self.stop_words, self.grammar = end_ids, tuple(stop_words), grammar
        self.reasoning = reasoning
        self.want_context_logits, self.want_generation_logits = want_context_logits, want_generation_logits
        self.want_log_probs = want_log_probs or logprobs is not None
        self._uses_prompt_rows = want_context_logits or prompt_logprobs is not None
        self._uses_logits = want_generation_logits or bool(rules.processors)

        self.num_prompt, self.num_resumed = len(prompt), len(resumed)
        self.num_tokens = self.num_prompt + self.num_resumed
        self.num_computed = self.num_under_way = self.num_drafted = 0
        self.tokens = np.empty(len(prompt) + max_new_tokens, dtype=np.int32)
        self.tokens[: len(prompt)] = prompt
        self.tokens[len(prompt) : self.num_tokens] = resumed
        self.blocks = BlockTable(cache_salt)
        self.priority, self.arrival = priority, -1
        self.slot: int | None = None
        self.follows_tokens = True
        self.started: float | None = None
        self.num_cached: int | None = None
        self.num_lost = 0

        self.log_probs: list[float] = []
        self.context_logits: list[Float32] = []
        self.generation_logits: list[Float32] = []
        self.token_probs: list[TokenProbs] = []
        self.prompt_probs: list[TokenProbs] = []
        self.num_context_logits = 0  # prompt positions whose logits were of use already
        self.finish_reason: FinishReason | None = None
        self.error: IngotError | None = None

    @property
    def repeats(self) -> bool:
        """Whether it decodes, and the host is not asked for anything between two draws."""
        return self.num_tokens - self.num_computed == 1 and self.num_tokens > self.num_prompt and not self._uses_logits

    def may_follow(self, count: int) -> bool:
        """Whether the step after one that computes `count` tokens of it can begin before that one's token is known."""
        draws = self.num_computed + count == self.num_tokens
        return draws and not (self.follows_tokens or self._uses_logits or self.wants_prompt_rows)

    @property
    def most_drafts(self) -> int:
        """Drafts that may follow its last token. Not even one where the session or the host has to see each token."""
        if self.rules.processors or self.reasoning.end:
            return 0
        return len(self.tokens) - self.num_tokens - 1

    def draft(self, tokens: Int32) -> None:
        """Have the next step compute these guesses behind the last token, at most `most_drafts`."""
        self.tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens
        self.num_drafted = len(tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Whose turn is first: the lower order's. It never changes after arrival."""
        return self.arrival + self.priority * PRIORITY_STEP, self.arrival

    @property
    def num_begun(self) -> int:
        """Tokens that are in the KV cache, or will be when the steps under way have run."""
        return self.num_computed + self.num_under_way

    @property
    def num_pending(self) -> int:
        """Known tokens that no step has begun."""
        return self.num_tokens - self.num_begun

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def max_cached_tokens(self) -> int:
        """Tokens in the KV cache at its longest: the last token is never fed back."""
        return len(self.tokens) - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def failure(self) -> IngotError | None:
        """What to tell a caller who has not ended it: None while it runs, and where it came to its own end."""
        if self.finish_reason is FinishReason.ABORT and self.error is None:
            return RequestError("the request was aborted by somebody else")
        return self.error

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the logits of prompt positions are still of use."""
        return self._uses_prompt_rows and self.num_context_logits < self.num_prompt

    def first_logit_position(self) -> int:
        """From here to the last known token, logits are wanted: the last token's, or the prompt's not yet used."""
        if self.wants_prompt_rows:
            return max(self.num_context_logits, self.num_begun)
        return self.num_tokens - 1

    def logit_rows(self, count: int) -> int:
        """Rows of logits that a chunk of `count` pending tokens gives."""
        if not self._uses_prompt_rows:
            return max(0, count - self.num_pending + 1)  # more than one where drafts follow the last token
        return max(0, self.num_begun + count - self.first_logit_position())

    def fitting(self, count: int, max_rows: int) -> int:
        """The longest chunk of at most `count` tokens that gives at most `max_rows` rows of logits."""
        return min(count, self.first_logit_position() - self.num_begun + max_rows)

    def append(self, token: int, log_prob: float, ending: int = Ending.NONE) -> None:
        """Take the next token. ending: an Ending."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.log_probs.append(log_prob)
        if ending:
            self.finish_reason = _REASONS[ending]

    def catch_up(self, tokens: Int32, log_probs: Sequence[float]) -> None:
        """Take the tokens of several steps, each computed in the step after the one that drew it. None of them ends the
        request.
        """
        end = self.num_tokens + len(tokens)
        self.tokens[self.num_tokens : end] = tokens
        self.num_tokens = end
        self.num_computed += len(tokens)
        self.log_probs += log_probs

    def generated(self) -> Int32:
        """The generated tokens: a view, int32 [num_generated]."""
        return self.tokens[self.num_prompt : self.num_tokens]
