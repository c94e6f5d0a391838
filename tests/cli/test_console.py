"""Progress and remarks: plain lines in a log, nothing on stdout, fewer words at lower levels."""

import errno
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
        "weights 0%",
        "weights 100%",
        "graph 100%",
        "warning: a NaN",
        "lowered",
        "pass fired 3 times",
    ]
    assert capsys.readouterr().out == ""


def test_bytes_have_a_rate_and_a_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MiB/s from the second call of a stage on; what was done in an earlier stage does not count."""
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr("ingot.cli.console.time.monotonic", lambda: float(next(clock)))
    log = io.StringIO()
    with Talk(Level.INFO, log) as talk:
        talk.progress_bytes("hashing", 1000 << 20, 4000 << 20)
        for done in (1000, 1040, 1080, 4000):
            talk.progress_bytes("weights", done << 20, 4000 << 20)
        talk.progress("rounds", 1, 3)
        talk.progress("rounds", 2, 3)
    assert log.getvalue().splitlines() == [
        "hashing 25%",
        "weights 25%",
        "weights 26%, 4 MiB/s, 12:20 left",
        "weights 27%, 4 MiB/s, 12:10 left",
        "weights 100%, 100 MiB/s",
        "rounds 33%",
        "rounds 67%, 0:10 left",
    ]
    screen = Terminal()
    with Talk(Level.INFO, screen) as talk:
        talk.progress_bytes("weights", 0, 4000 << 20)
        talk.progress_bytes("weights", 1000 << 20, 4000 << 20)
    assert "25%" in screen.getvalue()
    assert "/s, " in screen.getvalue()


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


def test_a_log_that_cannot_be_written_ends_no_work() -> None:
    tried: list[str] = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(errno.ENOSPC, "no space left on device")

    _work(Talk(Level.INFO, Full()))
    assert any("a NaN" in text for text in tried)
