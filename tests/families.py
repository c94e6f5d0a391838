"""Which families show all that models do.

A family is a way to read files: what a model computes is its ModelConfig alone. Tests of what comes behind `convert`
need each thing that a ModelConfig can say in one family, not each family: `convert` itself, whole engines against
transformers and the support page are tried with all of them.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator

from ingot.configs.read import Section
from ingot.convert.family import family_names, find_family, read_model
from tests.spanning import often

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
    left = {name: set(features(_model(name))) for name in family_names() if name not in without}
    chosen, missing = list[str](), set[Feature]().union(*left.values())
    while missing:
        best = max(left, key=lambda name: len(left[name] & missing))
        chosen.append(best)
        missing -= left.pop(best)
    return tuple(sorted(chosen))


def _model(name: str) -> object:
    return read_model(Section(find_family(name).tiny, "config.json"), None)[1]


def covering_first() -> list[object]:
    """Every family; slow, where another one shows all that it does."""
    return often(family_names(), covering_families())
