"""Patterns of a quantisation configuration, by which it means modules.

Regular expressions come with the model, so they may be made to hang. One is refused where trying all its choices on a
name may take too long; this is known from the expression's text.
"""

import fnmatch
import math
import re
from collections.abc import Sequence

from ingot.errors import ConfigError

_LONGEST = 2_000  # characters of an expression, and of a name it is tried on
_MOST_STEPS = 10_000_000  # less than a second
_COUNTED = re.compile(r"\{(\d*)(,\d*)?\}")
_GROUPS = re.compile(r"\?(?:P<\w+>|:|=|!|<=|<!)")


def is_named(module: str, patterns: Sequence[str]) -> bool:
    """Whether one of a configuration's patterns means the module: whole parts of a dotted name, `re:`, or wildcards."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if matches(pattern[3:], module):
                return True
        elif "*" in pattern:
            if fnmatch.fnmatchcase(module, pattern):
                return True
        elif f".{pattern}." in f".{module}.":
            return True
    return False


def matches(pattern: str, module: str, of: str = "the quantization config") -> bool:
    """A regular expression of a configuration, which `of` names. Raises ConfigError for a text that is none, or that
    may take long."""
    try:
        found = re.compile(pattern) if len(pattern) <= _LONGEST else None
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"a pattern of {of} is not a regular expression", got=pattern[:200]) from error
    steps = math.inf if found is None or len(module) > _LONGEST else _steps(pattern, len(module))
    if found is None or steps > _MOST_STEPS:
        raise ConfigError(
            f"a regular expression of {of} may take too long",
            where=module[:200],
            expected=f"at most {_LONGEST:,} characters, no repeated group with choices, few quantifiers",
            got=pattern[:200],
            hint="write a simpler expression, or list the names of the modules",
        )
    return found.match(module) is not None


def _steps(pattern: str, length: int) -> float:
    """How many ways an expression may be tried on a text of this length, at most; infinite where that is not known.

    Repeats in a row share the text: k of them have (length + k over k) ways. Alternatives and options multiply.
    """
    repeats, ways = 0, 1.0
    before: list[tuple[int, float]] = []  # repeats and ways before each group that is open
    alternatives = [1]  # of the whole expression, and of each group that is open
    closed: tuple[int, float] | None = None  # repeats and ways before the group that ends here
    place = 0
    while place < len(pattern):
        step, ended = 1, None
        match pattern[place]:
            case "\\":
                step = 2
            case "[":
                step = _class_length(pattern, place)
            case "(":
                before.append((repeats, ways))
                alternatives.append(1)
                if pattern.startswith("(?", place):
                    kind = _GROUPS.match(pattern, place + 1)
                    if kind is None:  # flags may change what characters mean
                        return math.inf
                    step = 1 + len(kind[0])
            case "|":
                alternatives[-1] += 1
            case ")":
                ways *= alternatives.pop()
                ended = before.pop()
            case "*" | "+" | "?" | "{" if (quantifier := _quantifier(pattern, place)) is not None:
                step, optional = quantifier
                if optional:
                    ways *= 2
                elif closed is not None and closed != (repeats, ways):
                    return math.inf
                else:
                    repeats += 1
        closed = ended
        place += step
    return ways * alternatives[0] * math.comb(length + repeats, repeats)


def _class_length(pattern: str, place: int) -> int:
    """The length of "[...]"; a bracket that comes first is a member."""
    end = place + 1 + pattern.startswith("^", place + 1)
    end += pattern.startswith("]", end)
    while pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1 - place


def _quantifier(pattern: str, place: int) -> tuple[int, bool] | None:
    """Its length, with the mark of a lazy one, and whether it means once or never; None for a brace that is text."""
    size, optional = 1, pattern[place] == "?"
    if pattern[place] == "{":
        counted = _COUNTED.match(pattern, place)
        if counted is None or counted[0] == "{}":
            return None
        size, optional = len(counted[0]), counted[0] in ("{1}", "{0,1}", "{,1}")
    return size + pattern.startswith(("?", "+"), place + size), optional
