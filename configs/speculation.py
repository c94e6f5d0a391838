"""Speculative decoding: how many further tokens are drafted, and from what. The words are those of vLLM."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ingot.configs.unknown import refuse_unknown
from ingot.errors import UsageError

METHODS = ("ngram", "draft_model")
_SHORTEST, _LONGEST = 1, 16

_OWN_LENGTH = "leave it out: every step has as many drafts as pay, by what steps take and how often drafts are right"
_BUILT = "leave it out: `ingot build` decides that for a draft model, too"
_WAYS = {
    "revision": "leave it out: the model is an Engine on this machine",
    "quantization": _BUILT,
    "max_model_len": _BUILT,
    "tensor_parallel_size": "leave it out: a draft model has one rank",
    "draft_tensor_parallel_size": "leave it out: a draft model has one rank",
    "disable_by_batch_size": _OWN_LENGTH,
    "rejection_sample_method": "leave it out: tokens are those that decoding without drafts gives, also sampled ones",
}
_OLD_NAMES = ("ngram", "[ngram]")  # of the method, where vLLM had it as the name of a model


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
    """method                  "ngram": drafts are what came in the prompt or the answer behind the same last tokens;
                            "draft_model": a smaller model makes them
    model                   the Engine of this model; None: that of `ingot build --draft_dir`, in the Engine itself
    num_speculative_tokens  drafts that a request may have in a step, at most
    prompt_lookup_min       last tokens that must have come before
    prompt_lookup_max       of the places where most of them came before, up to so many, the latest counts
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = _SHORTEST
    prompt_lookup_max: int = _LONGEST

    def __post_init__(self) -> None:
        _check_method(self.method)
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise UsageError("speculative_config: model must be a path", got=repr(self.model)[:100])
        if self.model is not None and self.method == "ngram":
            raise UsageError("speculative_config: ngram takes no model", got=self.model, hint="leave model out")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
                raise UsageError(f"speculative_config: {name} must be a whole number, 1 to 64", got=repr(value)[:100])
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise UsageError(
                "speculative_config: prompt_lookup_min is more than prompt_lookup_max",
                got=f"{self.prompt_lookup_min} and {self.prompt_lookup_max}",
            )


def _check_method(method: object) -> None:
    if not isinstance(method, str) or method not in METHODS:
        raise UsageError(
            "speculative_config: this version has no such method",
            expected=", ".join(METHODS),
            got=repr(method)[:100],
            hint="ngram needs no draft model: its drafts are what came behind the same tokens before",
        )


def read_speculation(given: object) -> Speculation:
    """From a mapping with vLLM's keys, or from it as JSON. Raises UsageError."""
    if isinstance(given, Speculation):
        return given
    example = '{"method": "ngram", "num_speculative_tokens": 7}'
    if isinstance(given, str):
        text = given
        try:
            given = json.loads(text)
        except ValueError as error:
            raise UsageError(
                "speculative_config is not JSON", expected=example, got=f"{text[:100]!r}: {error}"
            ) from error
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError("speculative_config must be an object", expected=example, got=repr(given)[:100])
    document: Mapping[str, Any] = given
    values = {name: value for name, value in document.items() if value is not None}
    if "method" not in values and values.get("model") in _OLD_NAMES:
        values["method"] = "ngram"
        values.pop("model")
    if "method" not in values:
        raise UsageError("speculative_config names no method", expected=example, got=repr(given)[:100])
    fields = [field.name for field in dataclasses.fields(Speculation)]
    _check_method(values["method"])
    refuse_unknown("speculative_config", values, fields, _WAYS, UsageError)
    lookups = [name for name in values if name.startswith("prompt_lookup")]
    if lookups and values["method"] != "ngram":
        raise UsageError(f"speculative_config: {lookups[0]} is of the method ngram", hint=f"leave {lookups[0]} out")
    shortest, longest = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if shortest is None and isinstance(longest, int):
        values["prompt_lookup_min"] = min(_SHORTEST, longest)
    if longest is None and isinstance(shortest, int):
        values["prompt_lookup_max"] = max(_LONGEST, shortest)
    return Speculation(**values)
