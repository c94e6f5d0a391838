"""Keyword arguments that nobody knows: each is refused by name, with ingot's way to what it would have done."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ingot.errors import IngotError

Class = TypeVar("Class", bound=type)


@functools.cache  # every request asks
def parameters(function: Callable[..., object]) -> tuple[str, ...]:
    """The names that a function takes."""
    found = inspect.signature(function).parameters.values()
    return tuple(each.name for each in found if each.name != "self" and each.kind is not each.VAR_KEYWORD)


def refuse_unknown(
    owner: str, given: Mapping[str, object], known: Iterable[str], ways: Mapping[str, str], kind: type[IngotError]
) -> None:
    """Raise `kind` for the first of `given` that is not one of `known`.

    owner  what was called
    ways   names that other libraries have → what to do instead; None as the value of one says nothing
    """
    names = list(known)
    for name, value in given.items():
        if name in names or (value is None and name in ways):
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = ways.get(name) or (f"did you mean {near[0]!r}?" if near else "leave it out")
        raise kind(f"{owner} has no argument {name!r}", expected=", ".join(names), hint=hint)


def named_arguments_only(ways: Mapping[str, str], kind: type[IngotError]) -> Callable[[Class], Class]:
    """Decorates a dataclass: making one raises `kind` for what is not a field, where Python would raise a TypeError."""

    def decorate(cls: Class) -> Class:
        make: Callable[..., None] = cls.__init__  # type: ignore[misc]
        known = parameters(make)

        @functools.wraps(make)
        def make_of_known(self: object, *places: object, **values: Any) -> None:
            if places:
                raise kind(
                    f"{cls.__name__} takes named arguments only",
                    expected=f"{cls.__name__}({known[0]}=...)",
                    got=repr(places[0])[:100],
                )
            refuse_unknown(cls.__name__, values, known, ways, kind)
            make(self, **{name: value for name, value in values.items() if name in known})

        cls.__init__ = make_of_known  # type: ignore[misc]
        return cls

    return decorate
