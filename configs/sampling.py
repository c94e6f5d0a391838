"""How the tokens of one request are chosen, with vLLM's names and defaults."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.configs.unknown import named_arguments_only
from ingot.errors import RequestError

MAX_SEED = 2**64 - 1
_MIN_FLOAT32, _MAX_FLOAT32 = 1.1754944e-38, 3.4028234e38  # steps compute with float32
_MAX_N = 1 << 16  # each completion is a request of its own
_GUIDED = "say structured_outputs"
_BEAMS = "leave it out: beam search does not exist in this version; n gives several samples"
_WAYS = {
    "max_new_tokens": "say max_tokens",
    "max_output_len": "say max_tokens",
    "max_length": "max_tokens counts the new tokens alone",
    "min_new_tokens": "say min_tokens",
    "min_length": "say min_tokens",
    "include_stop_str_in_output": "say include_stop_str",
    "stop_words": "say stop",
    "stop_words_list": "say stop",
    "bad_words_list": "say bad_words",
    "end_id": "say stop_token_ids, and ignore_eos for the engine's own",
    "pad_id": "leave it out: nothing is padded",
    "random_seed": "say seed",
    "do_sample": "leave it out: temperature=0 is greedy, and any other samples",
    "num_return_sequences": "say n",
    "best_of": "say n, and choose by cumulative_logprob",
    "use_beam_search": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "guided_decoding": _GUIDED,
    "response_format": _GUIDED,
    "allowed_token_ids": "say logits_processors, which may ban all others",
    "detokenize": "leave it out: text comes with the token ids; ModelRunner has no text",
    "spaces_between_special_tokens": "leave it out: text is what the tokenizer's decoder makes",
    "truncate_prompt_tokens": "shorten the prompt",
    "output_kind": "leave it out: generate gives the end, generate_async each result so far",
    "extra_args": "leave it out: nothing reads it",
    "prompt_ignore_length": "leave it out: penalties take the whole prompt",
    "top_p_decay": "leave it out: parameters stay the same through a request",
    "top_p_min": "leave it out: parameters stay the same through a request",
    "return_context_logits": "ModelRunner.generate(output_context_logits=True)",
    "return_generation_logits": "ModelRunner.generate(output_generation_logits=True)",
    "priority": "ModelRunner.generate has it",
}
"""Parameters of other libraries → ingot's way."""


@named_arguments_only(_WAYS, RequestError)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request draws its tokens, and when it ends. Raises RequestError for a value that is out of range.

    Settings are applied in this order: logits_processors, structured_outputs, logit_bias and bans, repetition_penalty,
    frequency_penalty, presence_penalty, temperature, min_p, top_k, top_p. Log probabilities are those before all of
    them.

    max_tokens           generate at most this many tokens; None: as many as the engine's limits allow
    min_tokens           let no end token, stop token or stop text end the request before this many tokens
    temperature          divide the logits by this; 0 is greedy
    top_k                keep the k most likely tokens; 0 or -1 keep all
    top_p                then keep the smallest set of the most likely ones whose probability reaches this, in (0, 1]
    min_p                drop tokens less likely than this times the most likely one, 0 to 1
    seed                 start the request's own random stream with this; None: a random seed
    n                    generate this many independent completions; the i-th uses seed + i
    repetition_penalty   divide positive logits of tokens in prompt or output by this, and multiply negative ones
    presence_penalty     subtract this from the logits of tokens in the output
    frequency_penalty    subtract this once for each time that a token is in the output
    stop                 end the request at these texts, which are left out of the result
    stop_token_ids       end the request at these tokens, beside the engine's end tokens
    bad_words            never generate these texts (as the tokens that the tokenizer makes of them)
    ignore_eos           go on after the engine's end tokens
    logit_bias           add these numbers to the logits: token id → number
    logprobs             return this many of the most likely tokens at each place, beside the actual one; -1: all
    prompt_logprobs      return the same for the tokens of the prompt
    include_stop_str     keep the stop text, or the text of the stop token, in the result
    skip_special_tokens  leave special tokens out of the text
    logits_processors    call these before everything else: f(logits), f(generated ids, logits) or f(prompt ids,
                         generated ids, logits) → logits; a numpy array, float32 [vocab]
    structured_outputs   force a form of the text: StructuredOutputs, or a dictionary of its fields. In a chat it holds
                         for the answer, not for the reasoning before it
    thinking_token_budget  end the reasoning of a chat after this many tokens; None: the model ends it
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
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_integer("n", self.n, 1, _MAX_N)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        check_number("temperature", self.temperature, 0, math.inf, "a finite number, at least 0 (0 is greedy)")
        check_number("top_p", self.top_p, 0, 1, "above 0, at most 1")
        if self.top_p < _MIN_FLOAT32:
            raise RequestError(
                "top_p must be above 0", got=str(self.top_p), hint="for greedy decoding use temperature=0"
            )
        if self.seed is not None:
            check_integer("seed", self.seed, 0, MAX_SEED)
        if getattr(self.stop_token_ids, "ndim", 0) != 1:  # numpy's arrays are lists, too
            _check_list("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0)
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens is more than max_tokens", expected=f"at most {self.max_tokens}", got=str(self.min_tokens)
            )
        check_number("min_p", self.min_p, 0, 1, "at least 0, at most 1")
        check_penalties(self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)
        if self.thinking_token_budget is not None:
            check_integer("thinking_token_budget", self.thinking_token_budget, 0, 2**31 - 1)
        self._check_texts()
        self._check_logits()
        object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _check_texts(self) -> None:
        for name, value in (("stop", self.stop), ("bad_words", self.bad_words)):
            expected = "a list of texts, none empty"
            texts = (value,) if name == "stop" and isinstance(value, str) else () if value is None else value
            _check_list(name, texts, expected)
            if not all(isinstance(text, str) and text for text in texts):
                raise RequestError(f"{name} must be {expected}", got=repr(value)[:100])
        for name in ("ignore_eos", "include_stop_str", "skip_special_tokens"):
            check_flag(name, getattr(self, name))

    def _check_logits(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError("logit_bias must map token ids to numbers", got=repr(self.logit_bias)[:100])
        for token, bias in (self.logit_bias or {}).items():
            check_integer("logit_bias: a token id", token, 0)
            if bias != -math.inf:
                check_number("logit_bias: a bias", bias, -math.inf, math.inf, "a number, or -inf to ban the token")
        processors = () if self.logits_processors is None else self.logits_processors
        _check_list("logits_processors", processors, "a list of functions")
        for processor in processors:
            if not callable(processor):
                raise RequestError("logits_processors must be functions", got=repr(processor)[:100])


def _structured(value: object) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise RequestError(
            "structured_outputs must be StructuredOutputs, or a dictionary of its fields", got=repr(value)[:100]
        )
    return StructuredOutputs(**value)


def check_penalties(repetition: object, presence: object, frequency: object) -> None:
    """Raise RequestError for penalties that mean nothing."""
    check_number("repetition_penalty", repetition, _MIN_FLOAT32, math.inf, "a number above 0; 1 is none")
    for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        check_number(name, value, -math.inf, math.inf, "a finite number; 0 is none")


def _check_list(name: str, value: object, expected: str) -> None:
    """Raise RequestError unless `value` is a list, tuple, set or the like, which can be read again and again."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        raise RequestError(f"{name} must be {expected}", got=repr(value)[:100])


def check_flag(name: str, value: object) -> None:
    """Raise RequestError for anything but True and False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False", got=repr(value)[:100])


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    """Raise RequestError unless `value` is a whole number in [minimum, maximum]."""
    whole = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if whole is None or not minimum <= whole <= (math.inf if maximum is None else maximum):
        limits = f"at least {minimum}" + ("" if maximum is None else f", at most {maximum}")
        raise RequestError(f"{name} must be a whole number, {limits}", got=repr(value)[:100])


def check_number(name: str, value: object, minimum: float, maximum: float, expected: str) -> None:
    """Raise RequestError unless `value` is a finite number in [minimum, maximum]."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not minimum <= value <= maximum or not abs(value) <= _MAX_FLOAT32:  # type: ignore[operator, arg-type]
        raise RequestError(f"{name} must be {expected}", got=repr(value)[:100])
