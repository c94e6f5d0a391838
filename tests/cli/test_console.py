"""Progress and remarks: plain lines in a log, nothing on stdout, fewer words at lower levels."""

import errno
import io
import time

import pytest

from ingot.cli.console import LEVELS, CliConsole, Level


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _work(console: CliConsole) -> None:
    with console:
        for done in range(11):
            console.progress("weights", done, 10)
        console.progress("graph", 1, 1)
        console.warn("a NaN")
        console.note("lowered")
        console.detail("pass fired 3 times")


def test_short_work_prints_no_progress_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    log = io.StringIO()
    _work(CliConsole(Level.VERBOSE, log))
    assert log.getvalue().splitlines() == ["warning: a NaN", "lowered", "pass fired 3 times"]
    assert capsys.readouterr().out == ""


def _clock(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """`step` seconds between any two looks at the clock."""
    clock = iter(range(0, 1000, step))
    monkeypatch.setattr("ingot.cli.console.time.monotonic", lambda: float(next(clock)))


def test_a_log_has_a_line_now_and_then_with_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six seconds from call to call; what was done in an earlier stage does not count."""
    _clock(monkeypatch, 6)
    log = io.StringIO()
    with CliConsole(Level.INFO, log) as console:
        console.progress_bytes("hashing", 1000 << 20, 4000 << 20)
        for done in (1000, 1060, 1120, 1180, 4000):
            console.progress_bytes("weights", done << 20, 4000 << 20)
        console.progress_requests("generating", 1, 30)
        console.progress_requests("generating", 13, 30)
        console.progress("rounds", 1, 3)
        console.progress("rounds", 2, 3)
    assert log.getvalue().splitlines() == [
        "weights 26%, 10 MiB/s, 4:54 left",
        "weights 30%, 10 MiB/s, 4:42 left",
        "weights 100%, 125 MiB/s",
        "generating 43%, 2 requests/s, 0:08 left",
        "rounds 67%, 0:06 left",
    ]


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    _work(CliConsole(Level.INFO, screen))
    assert "weights" not in screen.getvalue(), "too short for a bar"
    assert "lowered" in screen.getvalue()
    _clock(monkeypatch, 1)
    with CliConsole(Level.INFO, screen) as console:
        console.progress_bytes("weights", 0, 4000 << 20)
        console.progress_bytes("weights", 1000 << 20, 4000 << 20)
        deadline = time.perf_counter() + 10  # rich draws ten times a second, later on a busy machine
        while "25%" not in screen.getvalue() and time.perf_counter() < deadline:
            time.sleep(0.05)
        console.progress_bytes("packing", 4000 << 20, 4000 << 20)
        console.hide()
    said = screen.getvalue()
    assert "weights" in said
    assert "25%" in said
    assert "/s, " in said
    assert said.endswith("\x1b[2K"), "the last thing written clears the line of the bar"


def test_text_on_a_terminal_is_not_torn_by_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the bar is hidden nothing more is drawn until there is progress again."""
    _clock(monkeypatch, 1)
    screen = Terminal()
    with CliConsole(Level.INFO, screen) as console:
        console.progress("building", 0, 2)
        console.progress("building", 1, 2)
        console.hide()
        before = screen.getvalue()
        for piece in ("The prince", " looked at", " Natasha."):
            screen.write(piece)
            screen.flush()
            time.sleep(0.15)  # longer than rich waits before it draws again
        assert screen.getvalue() == before + "The prince looked at Natasha."
        console.progress("measuring", 1, 2)
        assert "measuring" in screen.getvalue()


@pytest.mark.parametrize(
    ("level", "words"),
    [("error", []), ("warning", ["warning: a NaN"]), ("info", ["lowered"]), ("trace", ["pass fired 3 times"])],
)
def test_levels(level: str, words: list[str]) -> None:
    log = io.StringIO()
    _work(CliConsole(LEVELS[level], log))
    said = log.getvalue().splitlines()
    assert said[-1:] == words


def test_a_log_that_cannot_be_written_ends_no_work() -> None:
    tried: list[str] = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(errno.ENOSPC, "no space left on device")

    _work(CliConsole(Level.INFO, Full()))
    assert any("a NaN" in text for text in tried)
