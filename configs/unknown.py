"""Keyword arguments that nobody knows: each is refused by name, with ingot's way to what it would have done."""

import difflib
from collections.abc import Iterable, Mapping

from ingot.errors import IngotError


def refuse_unknown(
    owner: str,
    given: Iterable[str],
    known: Iterable[str],
    ways: Mapping[str, str],
    kind: type[IngotError],
) -> None:
    """Raise `kind` for the first of `given` that is not one of `known`.

    owner  what was called
    ways   names that other libraries have → what to do instead
    """
    names = [name for name in known if name != "self"]
    for name in given:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = ways.get(name) or (f"did you mean {near[0]!r}?" if near else "leave it out")
        raise kind(f"{owner} has no argument {name!r}", expected=", ".join(names), hint=hint)
