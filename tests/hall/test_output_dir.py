"""An output directory appears complete or not at all."""

import errno
from pathlib import Path

import pytest

from ingot.errors import CapacityError, IngotError, UsageError
from ingot.output_dir import OutputDir


def is_ours(path: Path) -> bool:
    return (path / "mark").exists()


def make(target: Path, text: str = "done") -> None:
    with OutputDir(target, is_previous=is_ours) as out:
        (out.path / "mark").write_text(text)


def fail(target: Path, error: BaseException) -> None:
    with OutputDir(target, is_previous=is_ours) as out:
        (out.path / "mark").write_text("half")
        raise error


def test_appears_on_success_with_plain_permissions(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with OutputDir(target, is_previous=is_ours) as out:
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
        OutputDir(tmp_path / "out", is_previous=is_ours) as out,
    ):
        out.require_space(1 << 60)


def test_a_parent_that_is_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be created"):
        make(tmp_path / "file" / "out")
