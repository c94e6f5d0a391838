"""An output directory that appears complete or not at all.

out/          the target, untouched until the end
.out.partial-1f3a09/   where the work writes; renamed to `out` on success, removed on failure or Ctrl-C
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ingot.errors import CapacityError, IngotError, UsageError

# EFBIG: the process's own file-size limit; EDQUOT: the user's quota. For the reader they all mean "no room".
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class OutputDir:
    """Context manager; write into `path`.

        with OutputDir(target, is_previous=is_engine) as out:
            (out.path / "config.json").write_text(...)

    target       final directory; parents are created
    is_previous  says whether an existing, non-empty directory is an earlier output of the same kind, which is then
                 replaced; every other non-empty directory is refused

    Raises UsageError where the target cannot be used, CapacityError where the disk fills up inside the block,
    IngotError for every other OSError inside it.
    """

    def __init__(self, target: Path, *, is_previous: Callable[[Path], bool]) -> None:
        self.target = Path(os.path.realpath(target))  # a link to a directory stays a link
        self.path = self.target.with_name(f".{self.target.name}.partial-{secrets.token_hex(3)}")
        self._is_previous = is_previous

    def __enter__(self) -> "OutputDir":
        self._refuse_foreign_target()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:
            raise _in_words(error, self.target) or UsageError(
                "the output directory cannot be created",
                where=str(self.target),
                got=error.strerror,
                hint="choose another directory",
            ) from error
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
        if isinstance(error, OSError):
            raise _in_words(error, self.target) or IngotError(
                "a file cannot be read or written; nothing was left behind",
                where=str(error.filename or self.target),
                got=error.strerror or str(error),
            ) from error

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
                hint="choose another directory or empty this one",
            )

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
        except BaseException:
            aside.rename(self.target)
            raise
        shutil.rmtree(aside, ignore_errors=True)


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
