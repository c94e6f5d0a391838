"""What a request asks of its draws beside temperature, top_k and top_p, token ids only."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ingot.errors import RequestError
from ingot.step_io import Float32, Int32

Processor = Callable[[list[int], list[int], Float32], object]
"""(prompt, generated tokens, logits float32 [vocab]) → logits."""

_FORMS: Mapping[int, Callable[[Callable[..., object]], Processor]] = {
    1: lambda call: lambda prompt, generated, logits: call(logits),
    2: lambda call: lambda prompt, generated, logits: call(generated, logits),
    3: lambda call: call,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """See step_io.DrawRules for the numbers.

    logit_bias  (token, what is added to its logit)
    bad_words   token sequences that are never generated: the last token of one is banned after the others
    min_tokens  generated tokens before which nothing but a limit ends the request: its end tokens are banned
    processors  change the row of raw logits, in this order, before everything else
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    processors: tuple[Processor, ...] = ()

    @functools.cached_property
    def always(self) -> tuple[Int32, Float32]:
        """Tokens, and what is added to their logits in every draw; -inf bans one."""
        banned = [word[0] for word in self.bad_words if len(word) == 1]
        ids = [*(token for token, _ in self.logit_bias), *banned]
        values = [*(value for _, value in self.logit_bias), *([-np.inf] * len(banned))]
        return np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)

    @functools.cached_property
    def words_after(self) -> dict[int, list[tuple[int, ...]]]:
        """Bad words of several tokens by the one before the last: few of them can be complete at any time."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for word in self.long_words:
            found.setdefault(word[-2], []).append(word)
        return found

    @functools.cached_property
    def long_words(self) -> tuple[tuple[int, ...], ...]:
        """Bad words of several tokens."""
        return tuple(word for word in self.bad_words if len(word) > 1)

    @functools.cached_property
    def long_word_tokens(self) -> Int32:
        """Theirs, with -1 behind each word."""
        return np.array([token for word in self.long_words for token in (*word, -1)], dtype=np.int32)

    @functools.cached_property
    def penalises(self) -> bool:
        """Whether the tokens so far matter to the logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @functools.cached_property
    def lasting(self) -> bool:
        """Whether every draw has the same biases, whatever was drawn before."""
        return not (self.long_words or self.min_tokens)


NO_RULES = Rules()


def read_processors(processors: Sequence[Callable[..., object]] | None) -> tuple[Processor, ...]:
    """f(logits), f(generated, logits) and f(prompt, generated, logits) → the last form. Raises RequestError."""
    read: list[Processor] = []
    for processor in processors or ():
        try:
            parameters = inspect.signature(processor).parameters.values()
        except (TypeError, ValueError):  # some callables of compiled modules do not say
            places = 2
        else:
            places = sum(
                p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters
            )
            places = 3 if places == 0 and any(p.kind is p.VAR_POSITIONAL for p in parameters) else places
        if places not in _FORMS:
            raise RequestError(
                "a logits processor takes the wrong number of arguments",
                got=str(places),
                expected="logits; or generated tokens, logits; or prompt tokens, generated tokens, logits",
            )
        read.append(_FORMS[places](processor))
    return tuple(read)


def process(rules: Rules, prompt: list[int], generated: list[int], logits: Float32) -> Float32:
    """The row after every processor. Raises RequestError for one that fails or returns no row of logits.

    The thread of a step serves many: whatever is raised, a SystemExit included, ends the request alone.
    """
    row = logits.copy()
    for processor in rules.processors:
        try:
            row = np.ascontiguousarray(processor(prompt, generated, row), dtype=np.float32)
        except BaseException as error:
            raise RequestError("a logits processor failed", got=repr(error)) from error
        if row.shape != logits.shape:
            raise RequestError(
                "a logits processor returned another shape", expected=str(logits.shape), got=str(row.shape)
            )
    if not np.isfinite(row.max()):
        raise RequestError(
            "the logits processors left no token to choose", expected="finite numbers, or -inf for banned tokens"
        )
    return row
