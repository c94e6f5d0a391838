"""`ingot help`: topics, commands, and the nearest name for anything else; texts as wide as the terminal."""

import pytest

from ingot.cli import app
from ingot.cli.console import wrapped
from ingot.cli.topics import TOPICS
from ingot.convert.family import family_names
from ingot.dtypes import PRECISIONS
from ingot.plugins.registry import targets


def _help(capsys: pytest.CaptureFixture[str], *names: str) -> str:
    assert app.run(["help", *names]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_fits_a_terminal(
    topic: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.cli.console.terminal_width", lambda *_: 80)
    out = _help(capsys, topic)
    assert max(map(len, out.splitlines())) <= 80
    assert len(out) > 200
    assert out.isascii(), "for every terminal"


def test_topics_name_everything_there_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.cli.console.terminal_width", lambda *_: 0)
    said = " ".join(_help(capsys, topic) for topic in ("families", "targets", "precisions"))
    wanted = [*family_names(), *(target.name for target in targets()), *PRECISIONS]
    assert [name for name in wanted if name not in said] == []


def test_without_a_name_it_lists_commands_and_topics(capsys: pytest.CaptureFixture[str]) -> None:
    out = _help(capsys)
    assert [name for name in (*app.COMMANDS, *TOPICS) if name not in out] == []


def test_a_command_and_a_command_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max_seq_len" in _help(capsys, "build")
    assert "Usage: ingot bench latency" in _help(capsys, "bench", "latency")
    assert "What each exit code means" not in _help(capsys, "exit-codes"), "hyphens are underscores here, too"


@pytest.mark.parametrize(
    ("names", "words"), [(["tragets"], "did you mean 'targets'?"), (["bench", "latncy"], "latency")]
)
def test_typos(names: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["help", *names]) == 2
    assert words in capsys.readouterr().err


def test_rows_stay_below_each_other() -> None:
    text = "name  one two three four five\nplain words that are longer\n    lead and more words here\n"
    assert wrapped(text, 24) == (
        "name  one two three four\n      five\nplain words that are\nlonger\n    lead and more words\n    here"
    )
    assert wrapped("a name of more than twenty  x y z w", 24).splitlines()[1][0] != " "
    assert wrapped(text, 0) == text.removesuffix("\n"), "no terminal: for programs"


@pytest.mark.parametrize("names", [[name] for name in app.COMMANDS] + [["bench", "serve"], ["bench", "kernels"]])
def test_help_fits_100_columns_and_is_not_cut(
    names: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert app.run([*names, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100] == []
    cut = [line for line in lines if line.endswith("...") and not line.startswith(("Usage", "  help"))]
    assert cut == []
    assert [line for line in lines if " RANGE" in line] == []


def test_an_error_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a label is indented; a path or a command is never broken."""
    monkeypatch.setattr("ingot.cli.app.terminal_width", lambda *_: 60)
    assert app.run(["help", "nonsense"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[2].startswith("      "), lines
    command = "  next    ingot run --engine_dir " + "x" * 80
    assert wrapped(command, 60) == command
    assert "x" * 80 in wrapped("  where: " + "x" * 80, 60)
