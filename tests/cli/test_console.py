"""Progress and remarks: plain lines in a log, nothing on stdout, fewer words at lower levels."""

import io

import pytest

from ingot.cli.console import LEVELS, Level, Talk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _work(talk: Talk) -> None:
    with talk:
        for done in range(11):
            talk.progress("weights", done, 10)
        talk.progress("graph", 1, 1)
        talk.warn("a NaN")
        talk.note("lowered")
        talk.detail("pass fired 3 times")


def test_a_log_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log = io.StringIO()
    _work(Talk(Level.VERBOSE, log))
    assert log.getvalue().splitlines() == [
        "weights 0%", "weights 100%", "graph 100%", "warning: a NaN", "lowered", "pass fired 3 times",
    ]  # fmt: skip
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    screen = Terminal()
    _work(Talk(Level.INFO, screen))
    assert "weights" in screen.getvalue()
    assert "\x1b[" in screen.getvalue()
    assert "lowered" in screen.getvalue()


@pytest.mark.parametrize(
    ("level", "words"),
    [("error", []), ("warning", ["warning: a NaN"]), ("info", ["lowered"]), ("trace", ["pass fired 3 times"])],
)
def test_levels(level: str, words: list[str]) -> None:
    log = io.StringIO()
    _work(Talk(LEVELS[level], log))
    said = log.getvalue().splitlines()
    assert said[-1:] == words
