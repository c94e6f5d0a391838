"""Which families show all that models do.

A family is a way to read files: what a model computes is its ModelConfig alone. Tests of what comes behind `convert`
need each thing that a ModelConfig can say in one family, not each family: `convert` itself is tried with all of them
every day; whole engines against transformers, and the support page, in CI.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ingot.configs.read import Section
from ingot.convert.family import family_names, find_family, read_model
from tests.spanning import covering, often

Feature = tuple[str, object]


def features(value: object, where: str = "", usual: object = 0) -> Iterator[Feature]:
    """(where in the record, what it says): words and flags as they are, of numbers whether they are the usual ones."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "family":
                yield from features(getattr(value, field.name), f"{where}.{field.name}", field.default)
    elif isinstance(value, tuple | list | frozenset):
        for each in value:
            yield from features(each, f"{where}[]")
    elif value is None or isinstance(value, bool | str | enum.Enum):
        yield where, value
    else:
        yield where, value == usual


@functools.cache
def covering_families(without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Few families in which everything occurs that occurs in any: always the one with most that is new."""
    return tuple(sorted(covering({name: _shows(name) for name in family_names() if name not in without})))


def _shows(name: str, changes: Mapping[str, object] = MappingProxyType({})) -> set[Feature]:
    return set(features(read_model(Section({**find_family(name).tiny, **changes}, "config.json"), None)[1]))


def covering_first() -> list[object]:
    """Every family; slow, where another one shows all that it does."""
    return often(family_names(), covering_families())


def covering_variants(variants: Mapping[str, Mapping[str, object]]) -> list[tuple[str, bool]]:
    """(family, whether with the changes of its variant) of few models that show all that families and variants do."""
    shows = {(name, False): _shows(name) for name in covering_families()}
    return covering({**shows, **{(name, True): _shows(name, changes) for name, changes in variants.items()}})
