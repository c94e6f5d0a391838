"""Small random changes of JSON documents: what a hostile or careless hand might do to an engine's texts."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    63,
    64,
    (1 << 31) - 1,
    1 << 31,
    1 << 63,
    1 << 80,
    -0.0,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "\0",
    "\ud800",
    "ref",
    [],
    {},
    [[]],
    {"": None},
    [0],
    "0" * 5000,
)


def mutated(document: Any, rng: random.Random, count: int = 1) -> Any:
    """A copy with `count` changes."""
    holder = [copy.deepcopy(document)]
    for _ in range(count):
        parent, key = rng.choice(list(_places(holder)))
        rng.choice(_CHANGES)(parent, key, rng)
        if not holder:
            return {}
    return holder[0]


def retold(text: str, rng: random.Random) -> str:
    """The same JSON in other words, or what is no JSON any more: a change of the text itself."""
    at = rng.randrange(len(text))
    end = min(at + rng.randrange(1, 40), len(text))
    return rng.choice(
        [
            text[:at] + text[end:],
            text[:end] + text[at:end] + text[end:],
            text[:at] + " " + text[at:],
            text[:at] + rng.choice('{}[]",:019.eE-\\/') + text[at + 1 :],
            text[:at] + "[" * 100_000 + text[at:],
        ]
    )


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    """(list or object, index or key) of every value."""
    keys = range(len(holder)) if isinstance(holder, list) else list(holder)
    for key in keys:
        yield holder, key
        if isinstance(holder[key], (list, dict)):
            yield from _places(holder[key])


def _replace(parent: Any, key: Any, rng: random.Random) -> None:
    parent[key] = copy.deepcopy(rng.choice(ODD))


def _remove(parent: Any, key: Any, rng: random.Random) -> None:
    del parent[key]


def _nudge(parent: Any, key: Any, rng: random.Random) -> None:
    """A number a little larger, smaller, or as another type; a text a little longer."""
    value = parent[key]
    if isinstance(value, (int, float)):
        parent[key] = rng.choice([value + 1, value - 1, value * 2, value + 64, -value, float(value), str(value)])
    elif isinstance(value, str):
        parent[key] = rng.choice([value + "0", value[:-1], value.upper(), value + "\n"])
    else:
        _replace(parent, key, rng)


def _repeat(parent: Any, key: Any, rng: random.Random) -> None:
    """Once more, or under another name."""
    if isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
    else:
        parent[key + rng.choice(["", "2", " "])] = copy.deepcopy(parent[key])


def _swap(parent: Any, key: Any, rng: random.Random) -> None:
    """With a value beside it."""
    other = rng.choice(range(len(parent)) if isinstance(parent, list) else list(parent))
    parent[key], parent[other] = parent[other], parent[key]


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (_replace, _remove, _nudge, _nudge, _repeat, _swap)


def compact(document: Any) -> str:
    """As plans are written."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def indented(document: Any) -> str:
    """As manifests are written."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"
