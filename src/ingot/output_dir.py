"""An output directory that appears complete or not at all.

out/          the target, untouched until the end
.out.partial-1f3a09/   where the work writes; renamed to `out` on success, removed on failure or Ctrl-C

The process that writes holds a lock on the hidden directory, which the system takes away when it dies, however it
dies: a hidden directory without a lock is what is left of killed work, and the next work on the same target removes it.
"""

import errno
import fcntl
import fnmatch
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from ingot.errors import CapacityError, IngotError, UsageError

# EFBIG: the process's own file-size limit; EDQUOT: the user's quota. For the reader they all mean "no room".
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class OutputDir:
    """Context manager; write into `path`.

        with OutputDir(target, is_previous=is_engine, parts=("config.json", "rank*")) as out:
            (out.path / "config.json").write_text(...)

    target       final directory; parents are created
    is_previous  says whether an existing, non-empty directory is an earlier output of the same kind, which is then
                 replaced; every other non-empty directory is refused
    say          gets a line if an earlier output will be replaced
    parts        patterns of the files that such an output consists of: one that holds others too is refused, since
                 they would go with it (names with a leading dot do not count)

    Raises UsageError where the target cannot be used, CapacityError where the disk fills up inside the block,
    IngotError for every other OSError inside it.
    """

    def __init__(
        self,
        target: Path,
        *,
        is_previous: Callable[[Path], bool],
        parts: Iterable[str],
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.target = Path(os.path.realpath(target))  # a link to a directory stays a link
        self.path = self.target.with_name(f".{self.target.name}.partial-{secrets.token_hex(3)}")
        self._is_previous, self._parts, self._say = is_previous, tuple(parts), say
        self._lock: int | None = None

    def __enter__(self) -> "OutputDir":
        try:
            self._refuse_foreign_target()
            if self._say is not None and self.target.exists() and any(self.target.iterdir()):
                self._say(f"{self.target} holds an earlier output, which is replaced when the new one is complete")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_dead()
            self._make_path()
        except OSError as error:
            raise _in_words(error, self.target) or UsageError(
                "the output directory cannot be created",
                where=str(self.target),
                got=error.strerror,
                hint="choose another directory",
            ) from error
        except BaseException:  # interrupted: __exit__ is only called once this has returned
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        except OSError as failure:
            raise _in_words(failure, self.target) or UsageError(
                "the finished output cannot be moved to its place", where=str(self.target), got=failure.strerror
            ) from failure
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
        if isinstance(error, OSError):
            raise _in_words(error, self.target) or IngotError(
                "a file cannot be read or written; nothing was left behind",
                where=str(error.filename or self.target),
                got=error.strerror or str(error),
            ) from error

    def _make_path(self) -> None:
        """Make the hidden directory and lock it; if another process took it for a dead one meanwhile, make another."""
        while True:
            self.path.mkdir()
            self._lock = os.open(self.path, _DIRECTORY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: nothing is ever taken for dead there
                return
            if self.path.exists():
                return
            os.close(self._lock)
            self.path = self.path.with_name(f".{self.target.name}.partial-{secrets.token_hex(3)}")

    def _remove_dead(self) -> None:
        """Remove what killed processes left beside the target; an earlier output only where a later one is in place."""
        for entry in list(self.path.parent.iterdir()):
            kind, dash, _ = entry.name.removeprefix(f".{self.target.name}.").partition("-")
            if not (entry.name.startswith(f".{self.target.name}.") and dash and kind in ("partial", "previous")):
                continue
            if kind == "partial" or self.target.exists():
                _remove_unlocked(entry)

    def require_space(self, nbytes: int) -> None:
        """Raise CapacityError now if the disk has not `nbytes` free, rather than after an hour of work."""
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise CapacityError(
                "there is not enough disk space for the output",
                where=str(self.target),
                expected=f"{nbytes:,} bytes free",
                got=f"{free:,} bytes free",
                hint="free space or choose another disk",
            )

    def _refuse_foreign_target(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise UsageError("the output directory is a file", where=str(self.target), hint="choose another name")
        if any(self.target.iterdir()) and not self._is_previous(self.target):
            raise UsageError(
                "the output directory exists and holds something else",
                where=str(self.target),
                expected="a new or empty directory, or an earlier output of the same command",
                got=", ".join(sorted(entry.name for entry in self.target.iterdir())[:5]),
                hint="choose another directory",
            )
        if others := self._others():
            raise UsageError(
                "the output directory holds files that are not of an earlier output, and would be lost",
                where=str(self.target),
                got=", ".join(others[:5]),
                hint="move them elsewhere, or choose another directory",
            )

    def _others(self) -> list[str]:
        """The files in the target that are none of its parts."""
        files = (path for path in self.target.rglob("*") if not path.is_dir() and path.name[0] != ".")
        names = sorted(path.relative_to(self.target).as_posix() for path in files)
        return [name for name in names if not any(_matches(name, pattern) for pattern in self._parts)]

    def _publish(self) -> None:
        """Rename into place; an earlier output steps aside first and comes back if the rename fails."""
        self._refuse_foreign_target()
        if not self.target.exists():
            self.path.rename(self.target)
            return
        aside = self.target.with_name(f".{self.target.name}.previous-{secrets.token_hex(3)}")
        self.target.rename(aside)
        try:
            self.path.rename(self.target)
        except BaseException as failure:
            self._put_back(aside, failure)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def _put_back(self, aside: Path, failure: BaseException) -> None:
        """The earlier output returns from `aside` after a failure. Raises IngotError, which tells both failures."""
        try:
            aside.rename(self.target)
        except OSError as second:
            raise IngotError(
                "neither the new output nor the earlier one can be moved to its place",
                where=str(self.target),
                got=f"{failure!r} for the new one, then {second!r} for the earlier one",
                hint=f"the earlier one is whole; move it back: mv {aside} {self.target}",
            ) from failure


def _matches(name: str, pattern: str) -> bool:
    """fnmatch, folder by folder."""
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _in_words(error: OSError, target: Path) -> CapacityError | None:
    """A full disk as a CapacityError; None for every other error."""
    if error.errno not in _NO_ROOM:
        return None
    return CapacityError(
        "the disk is full; nothing was left behind",
        where=str(error.filename or target),
        got=error.strerror,
        hint="free space or choose another disk, then run the command again",
    )


def _remove_unlocked(path: Path) -> None:
    """Remove a directory unless a process holds its lock."""
    try:
        descriptor = os.open(path, _DIRECTORY)
    except OSError:  # gone meanwhile, or no directory of ours
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its process is at work, or the file system has no locks
        return
    finally:
        os.close(descriptor)
