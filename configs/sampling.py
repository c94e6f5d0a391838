"""How the tokens of one request are chosen, with vLLM's names and defaults."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence

from ingot.errors import RequestError

_MAX_SEED = 2**64 - 1

# Fields whose feature does not exist yet → the values that ask for nothing. Any other value is refused.
_NOT_YET: Mapping[str, tuple[object, ...]] = {
    "min_tokens": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stop": (None, "", [], ()),
    "bad_words": (None, [], ()),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "include_stop_str": (False,),
    "logits_processors": (None, [], ()),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Every field is applied; where its feature does not exist yet, any value but the default is refused.

    max_tokens           tokens to generate at most; None: as many as the engine's limits allow
    temperature          0 is greedy; otherwise logits are divided by it
    top_k                keep the k most likely tokens; 0 or -1 keep all
    top_p                then keep the smallest head of them whose probability reaches top_p, in (0, 1]
    seed                 of the request's own random stream; None draws one
    n                    independent completions of the prompt; the i-th uses seed + i
    stop_token_ids       end the request, beside the engine's end tokens
    ignore_eos           the engine's end tokens do not end the request
    skip_special_tokens  leave special tokens out of the text
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., object]] | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NOT_YET.items():
            refuse_not_yet(name, getattr(self, name), neutral)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_integer("n", self.n, 1)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        check_number("temperature", self.temperature, 0, math.inf, "a finite number, at least 0 (0 is greedy)")
        if self.top_p == 0:
            raise RequestError("top_p must be above 0", got="0", hint="for greedy decoding use temperature=0")
        check_number("top_p", self.top_p, 0, 1, "above 0, at most 1")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, _MAX_SEED)
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0)


def refuse_not_yet(name: str, value: object, neutral: tuple[object, ...]) -> None:
    """Raise RequestError if `value` is none of `neutral`: it asks for something that ingot cannot do yet."""
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
    if not plain or value not in neutral:
        raise RequestError(
            f"{name} is not supported yet", expected=repr(neutral[0]), got=repr(value)[:100], hint=f"leave {name} out"
        )


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise RequestError unless `value` is a whole number in [minimum, maximum]."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not minimum <= int(value) <= (math.inf if maximum is None else maximum):  # type: ignore[call-overload]
        limits = f"at least {minimum}" + ("" if maximum is None else f", at most {maximum}")
        raise RequestError(f"{name} must be a whole number, {limits}", got=repr(value)[:100])


def check_number(name: str, value: object, minimum: float, maximum: float, expected: str) -> None:
    """Raise RequestError unless `value` is a finite number in [minimum, maximum]."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not minimum <= value <= maximum:  # type: ignore[arg-type, operator]
        raise RequestError(f"{name} must be {expected}", got=repr(value)[:100])
