"""An output directory appears complete or not at all."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import CapacityError, IngotError, UsageError
from ingot.output_dir import OutputDir

PARTS = ("mark", "stale", "templates/*")


def is_ours(path: Path) -> bool:
    return (path / "mark").exists()


def make(target: Path, text: str = "done") -> None:
    with OutputDir(target, is_previous=is_ours, parts=PARTS) as out:
        (out.path / "mark").write_text(text)


def fail(target: Path, error: BaseException) -> None:
    with OutputDir(target, is_previous=is_ours, parts=PARTS) as out:
        (out.path / "mark").write_text("half")
        raise error


def test_appears_on_success_with_plain_permissions(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with OutputDir(target, is_previous=is_ours, parts=PARTS) as out:
        (out.path / "mark").write_text("x")
        assert not target.exists()
    assert (target / "mark").read_text() == "x"
    assert [entry.name for entry in target.parent.iterdir()] == ["out"]
    assert target.stat().st_mode == target.parent.stat().st_mode


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure):
        fail(tmp_path / "out", failure())
    assert list(tmp_path.iterdir()) == []


def test_says_that_an_earlier_output_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    for text in ("first", "second"):
        with OutputDir(tmp_path / "out", is_previous=is_ours, parts=PARTS, say=said.append) as out:
            (out.path / "mark").write_text(text)
    assert said == [f"{tmp_path / 'out'} holds an earlier output, which is replaced when the new one is complete"]
    assert (tmp_path / "out" / "mark").read_text() == "second"


def test_failure_keeps_the_previous_output(tmp_path: Path) -> None:
    make(tmp_path / "out", "first")
    with pytest.raises(RuntimeError):
        fail(tmp_path / "out", RuntimeError())
    assert (tmp_path / "out" / "mark").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_replaces_a_previous_output_and_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", "first")
    (tmp_path / "out" / "stale").write_text("old")
    make(tmp_path / "out", "second")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["mark"]
    assert (tmp_path / "out" / "mark").read_text() == "second"
    assert len(list(tmp_path.iterdir())) == 1


def test_refuses_a_foreign_directory_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds something else(.|\n)*chapter1\.txt"):
        make(tmp_path / "thesis")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        make(tmp_path / "file")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "thesis"]


@pytest.mark.parametrize("other", ["notes.txt", "engine/mark", "templates/more/mark"])
def test_refuses_to_lose_what_lies_in_an_earlier_output(tmp_path: Path, other: str) -> None:
    make(tmp_path / "out", "first")
    for name in ("templates/a", ".hidden", other):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("years of work")
    with pytest.raises(UsageError, match=rf"would be lost(.|\n)*got: {other}\n"):
        make(tmp_path / "out", "second")
    (tmp_path / "out" / other).unlink()
    make(tmp_path / "out", "second")
    assert (tmp_path / "out" / "mark").read_text() == "second"


def fail_renames(monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
    """Of the renames from now on, those of these numbers fail: 1 moves the earlier output aside, 2 the new one to its
    place, 3 the earlier one back."""
    rename, count = Path.rename, itertools.count(1)

    def maybe(self: Path, target: Path) -> Path:
        number = next(count)
        if number in failing:
            raise OSError(errno.EIO, f"rename {number} failed", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", maybe)


@pytest.mark.parametrize("failing", [1, 2])
def test_the_earlier_output_comes_back_when_a_rename_fails(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out", "first")
    fail_renames(monkeypatch, failing)
    with pytest.raises(IngotError, match=rf"cannot be moved to its place(.|\n)*rename {failing} failed"):
        make(tmp_path / "out", "second")
    assert (tmp_path / "out" / "mark").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_where_the_earlier_output_is_when_it_cannot_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "first")
    with monkeypatch.context() as patch:
        fail_renames(patch, 2, 3)
        with pytest.raises(IngotError, match=r"rename 2 failed(.|\n)*rename 3 failed") as refused:
            make(tmp_path / "out", "second")
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith(".out.previous-")
    assert (aside / "mark").read_text() == "first"
    assert f"mv {aside} {tmp_path / 'out'}" in str(refused.value)


def test_an_interrupted_rename_brings_the_earlier_output_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "first")
    rename, seen = Path.rename, list[Path]()

    def interrupted(self: Path, target: Path) -> Path:
        seen.append(self)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", "second")
    assert (tmp_path / "out" / "mark").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    make(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "mark").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_a_capacity_error(tmp_path: Path, number: int) -> None:
    with pytest.raises(CapacityError, match="disk is full"):
        fail(tmp_path / "out", OSError(number, "no room", "mark"))
    assert list(tmp_path.iterdir()) == []


def test_other_os_errors_become_words(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match=r"cannot be read or written(.|\n)*mark(.|\n)*Permission denied"):
        fail(tmp_path / "out", PermissionError(errno.EACCES, "Permission denied", "mark"))
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_ahead(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityError, match="not enough disk space"),
        OutputDir(tmp_path / "out", is_previous=is_ours, parts=PARTS) as out,
    ):
        out.require_space(1 << 60)


def test_a_parent_that_is_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be created"):
        make(tmp_path / "file" / "out")


WORK = """
import sys
from pathlib import Path
from ingot.output_dir import OutputDir

with OutputDir(Path(sys.argv[1]), is_previous=lambda _: True, parts=["*"]) as out:
    (out.path / "half").write_text("x")
    print(out.path, flush=True)
    input()
"""


def started(target: Path) -> "tuple[subprocess.Popen[str], Path]":
    """A process at work, and its hidden directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_killed_work_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """And neither what work at the same time writes, nor what only looks alike."""
    killed, dead = started(tmp_path / "out")
    killed.kill()
    killed.communicate()
    working, alive = started(tmp_path / "out")
    assert not dead.exists()
    others = [tmp_path / name for name in (".out2.partial-1", ".out.partial", "out.partial-1", ".out.other-1")]
    for other in others:
        other.mkdir()
    (tmp_path / ".out.partial-file").write_text("no directory")
    (tmp_path / ".out.partial-link").symlink_to(others[0])
    (tmp_path / ".out.previous-1").mkdir()
    make(tmp_path / "out")
    assert (alive / "half").exists()
    assert all(other.exists() for other in others)
    assert (tmp_path / ".out.previous-1").exists(), "kept as long as nothing else was in place"
    make(tmp_path / "out")
    assert not (tmp_path / ".out.previous-1").exists()
    working.communicate("\n")
    assert (tmp_path / "out" / "half").exists()
    assert not alive.exists()


def test_interrupted_work_leaves_nothing(tmp_path: Path) -> None:
    process, _ = started(tmp_path / "out")
    os.kill(process.pid, signal.SIGINT)
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    make(tmp_path / "out")
    with pytest.raises(RuntimeError):
        fail(tmp_path / "out", RuntimeError())
    assert len(os.listdir("/proc/self/fd")) == before
