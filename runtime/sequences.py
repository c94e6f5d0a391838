"""Requests ↔ the slots in which a session holds their sequences.

request in a step ──start──▶ slot ──ended, or its slot is wanted──▶ free
"""

from collections.abc import Iterable

from ingot.runtime.request import Request
from ingot.step_io import SequenceRules, Session


class Sequences:
    """A preempted request keeps its slot as long as nobody else wants it."""

    def __init__(self, session: Session, slots: int) -> None:
        self._session, self._free, self._held = session, list(range(slots)), set[Request]()

    def start(self, requests: Iterable[Request]) -> None:
        """Give every request of a step a slot. Those that have none begin with the tokens they have."""
        for request in requests:
            if request.slot is None:
                if not self._free:
                    self.end([next(held for held in self._held if not held.blocks.count)])
                slot = self._free[-1]
                rules = sequence_rules(request)
                self._session.start(slot, rules, request.tokens[: request.num_tokens], request.num_prompt)
                request.slot, request.follows_tokens = self._free.pop(), rules.follows_tokens
                self._held.add(request)

    def end(self, requests: Iterable[Request]) -> None:
        """Forget requests, also those whose state in the session is not known any more: they start again."""
        for request in requests:
            if request.slot is not None:
                self._session.end(request.slot)
                self._free.append(request.slot)
                self._held.remove(request)
                request.slot = None


def sequence_rules(request: Request) -> SequenceRules:
    """What a session is told of a request."""
    rules = request.rules
    return SequenceRules(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=rules.min_p,
        seed=request.seed,
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        logit_bias=rules.logit_bias,
        bad_words=rules.bad_words,
        stop_words=request.stop_words,
        end_ids=tuple(sorted(request.end_ids)),
        min_tokens=rules.min_tokens,
        max_tokens=request.max_new_tokens,
        log_prob=request.want_log_probs,
        top=request.logprobs,
        reasoning_end=request.reasoning.end,
        reasoning_begin=request.reasoning.begin,
        reasoning_budget=request.reasoning.budget,
        grammar=request.grammar,
    )
