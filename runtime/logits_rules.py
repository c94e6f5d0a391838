"""What a request asks of its draws beside temperature, top_k and top_p, token ids only; logits processors."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ingot.errors import RequestError
from ingot.step_io import Float32

Processor = Callable[[list[int], list[int], Float32], object]
"""(prompt, generated tokens, logits float32 [vocab]) → logits."""

_FORMS: Mapping[int, Callable[[Callable[..., object]], Processor]] = {
    1: lambda call: lambda prompt, generated, logits: call(logits),
    2: lambda call: lambda prompt, generated, logits: call(generated, logits),
    3: lambda call: call,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """See step_io.SequenceRules. processors: change the row of raw logits, in this order, before everything else."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    processors: tuple[Processor, ...] = ()


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
