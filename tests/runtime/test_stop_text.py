"""Stop texts: found in any cutting of the text, and nothing is held back that cannot begin one."""

import itertools
import random

import pytest

from ingot.runtime.stop_text import StopText


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    search = StopText(stops, include=include)
    text = ""
    for piece in pieces:
        certain, found = search.push(piece)
        text += certain
        if found is not None:
            return text, found
    return text + search.finish(), None


def plain(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first stop text to end; of those that end together the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.daily(169)
@pytest.mark.parametrize("seed", range(200))
def test_any_cut_gives_the_same(seed: int) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choices("ab", k=30))
    stops = ["".join(chance.choices("ab", k=chance.randint(1, 7))) for _ in range(chance.randint(1, 4))]
    cuts = sorted({0, len(text), *(chance.randrange(len(text)) for _ in range(10))})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert run(stops, pieces) == plain(stops, text)
    kept, found = run(stops, pieces, include=True)
    assert kept == plain(stops, text)[0] + (found or "")


def test_only_what_may_begin_a_stop_text_is_held() -> None:
    search = StopText(["\n\nQ:"], include=False)
    assert search.push("the end.\n\n") == ("the end.", None)
    assert search.push("No") == ("\n\nNo", None)
    assert search.push("\n\nQ:", may_stop=False) == ("\n\nQ:", None)
    assert search.push("\n") == ("", None)
    assert search.finish() == "\n"
    assert StopText([], include=False).push("abc") == ("abc", None)
