"""Every error that ingot raises on purpose.

    IngotError
    ├── UsageError              wrong option or argument (exit code 2)
    │   └── MissingMethodError  a method that other libraries have (also an AttributeError)
    ├── ConfigError             a value in a JSON or TOML file
    ├── CheckpointError         a Hugging Face directory or a Checkpoint
    │   ├── UnsupportedModelError
    │   └── MissingModelError   a path that does not exist (exit code 2, as a UsageError)
    ├── BuildError              Checkpoint → Engine
    │   ├── PassError
    │   └── NoKernelError
    ├── EngineError             an Engine file: damaged, foreign, too new
    │   ├── TargetError         this machine cannot run it
    │   └── MissingEngineError  a path that does not exist (exit code 2, as a UsageError)
    ├── RankError               a process that shares the model has ended, failed or is late; no step follows
    ├── RequestError            one request is wrong; others are not touched
    └── CapacityError           not enough memory or disk

A message says what failed, where, what was expected and found, and what to do next.
"""

import difflib
from pathlib import Path
from typing import ClassVar

REBUILD = "build the engine again with `ingot build --checkpoint_dir ... --output_dir ...`"
"""The next step where an engine is of no use."""


def install(extra: str) -> str:
    """The command that installs an extra. It names the wheel's file, because the project is not on PyPI: its name there
    would be a stranger's."""
    return f'pip install "$(ls dist/ingot-*.whl)[{extra}]"'


def spelled(path: Path) -> str:
    """The next step where `path` does not exist: the entry beside it that is spelled most like it, if any. Or where it
    is a file in the place of a directory."""
    if path.is_file():
        return "this is a file: give a directory"
    try:
        beside = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        beside = []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.with_name(close[0])}?" if close else "look at how the path is spelled"


class IngotError(Exception):
    """Root of all errors of this package.

    what      one sentence: what went wrong
    where     file, file:key, node path or tensor name
    expected  what would have been right
    got       what was found
    hint      the next step for the reader; without one, that of the class
    """

    NEXT: ClassVar[str | None] = None

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got = what, where, expected, got
        self.hint = self.NEXT if hint is None else hint
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        for label, value in (
            ("where", self.where),
            ("expected", self.expected),
            ("got", self.got),
            ("next", self.hint),
        ):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)


class UsageError(IngotError):
    """An option or argument is wrong; commands exit with code 2."""


class MissingMethodError(UsageError, AttributeError):
    """A method that other libraries have and this one has not; hasattr says False."""


class ConfigError(IngotError):
    """A value in a configuration file is missing, of the wrong type or not supported."""

    NEXT = "correct the file"


class CheckpointError(IngotError):
    """A Hugging Face directory or a Checkpoint cannot be read."""

    NEXT = "download the model again, or take another version of it"


class UnsupportedModelError(CheckpointError):
    """The model's type or one of its features has no implementation."""

    NEXT = "convert another model: `ingot help families` lists what is supported"


class MissingModelError(CheckpointError, UsageError):
    """The path of a Hugging Face directory or a Checkpoint does not exist."""


class BuildError(IngotError):
    """A Checkpoint cannot become an Engine."""

    NEXT = "convert the model again; if it stays so, report it as a bug of ingot"


class PassError(BuildError):
    """A graph pass broke its promise or left a node that nothing can lower."""


class NoKernelError(BuildError):
    """No kernel of the target computes an op at the wanted precision."""

    NEXT = "choose another --precision, --activations or --target"


class EngineError(IngotError):
    """An Engine is damaged, incomplete or of another schema."""

    NEXT = REBUILD


class TargetError(EngineError):
    """This machine lacks what the Engine's target needs."""

    NEXT = "`ingot doctor --all` says what this machine lacks"


class MissingEngineError(EngineError, UsageError):
    """The path of an Engine does not exist."""


class RankError(IngotError):
    """The processes that share a model cannot go on together: start all of them again."""

    NEXT = "start all ranks again"


class RequestError(IngotError):
    """A request cannot be served; the others go on."""


class CapacityError(IngotError):
    """Not enough memory or disk for the work."""

    NEXT = "free memory or disk space, then run the command again"
