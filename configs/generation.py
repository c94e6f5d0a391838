"""generation_config.json of a model: the sampling that its makers recommend. Only `run` and `serve` apply it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.configs.read import Section
from ingot.configs.sampling import SamplingParams
from ingot.errors import ConfigError, RequestError

_APPLIED = ("temperature", "top_k", "top_p")
# applied too, unless the user says otherwise
_OTHERS = ("repetition_penalty", "min_p")
# settings that change which token is chosen, and cannot be followed yet → the value that changes nothing
_NOT_FOLLOWED = {
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_new_tokens": 0,
    "min_length": 0,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """do_sample False is greedy. None: the file does not say. others: further fields of SamplingParams.
    not_followed: "name=value" of settings ingot lacks."""

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)
    not_followed: tuple[str, ...] = ()

    def resolve(self, temperature: float | None, top_k: int | None, top_p: float | None) -> tuple[float, int, float]:
        """(temperature, top_k, top_p) of a request: what the user gave, then the file, then plain sampling.

        Greedy if the user gave none of them and the file does not sample.
        """
        if temperature is None and top_k is None and top_p is None and not self.do_sample:
            return 0.0, 0, 1.0
        return (
            next(value for value in (temperature, self.temperature, 1.0) if value is not None),
            next(value for value in (top_k, self.top_k, 0) if value is not None),
            next(value for value in (top_p, self.top_p, 1.0) if value is not None),
        )


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """From generation_config.json in an engine directory; an absent file recommends nothing."""
    path = directory / "generation_config.json"
    section = Section.from_file(path) if path.is_file() else Section({}, str(path))
    numbers = {key: _checked(section, key) for key in (*_APPLIED, *_OTHERS) if section.has(key)}
    not_followed = tuple(
        f"{key}={section.raw(key)!r}"
        for key, neutral in _NOT_FOLLOWED.items()
        if section.raw(key) not in (None, neutral)
    )
    return GenerationDefaults(
        do_sample=section.boolean("do_sample", False),
        temperature=numbers.get("temperature"),
        top_k=None if "top_k" not in numbers else int(numbers["top_k"]),
        top_p=numbers.get("top_p"),
        others={key: numbers[key] for key in _OTHERS if key in numbers},
        not_followed=not_followed,
    )


def _checked(section: Section, key: str) -> float:
    """A setting that a request may have. Raises ConfigError for all that `SamplingParams` refuses."""
    value: Any = section.raw(key)
    try:
        SamplingParams(**{key: value})
    except RequestError as error:
        raise ConfigError(
            f"{key} has a wrong value",
            where=section.place(key),
            expected=error.expected or error.what,
            got=repr(value)[:200],
        ) from error
    number: float = value
    return number
