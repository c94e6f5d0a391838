"""The group of commands: names and typos, and how an error becomes words and an exit code.

Exit codes: 0 done, 1 the work failed, 2 wrong usage, 130 interrupted, 143 terminated.
"""

import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

import ingot
from ingot.errors import IngotError, UsageError

COMMANDS = {
    "quickstart": "The whole path on the small model that ships with ingot.",
    "convert": "Hugging Face directory to Checkpoint.",
    "build": "Checkpoint to Engine.",
    "run": "Text in, text out.",
    "serve": "OpenAI-compatible HTTP server.",
    "bench": "Latency and throughput of an Engine on this machine.",
    "inspect": "Show a Checkpoint, a graph or an Engine.",
    "verify": "Check every hash of an Engine, or its numbers against the source.",
    "doctor": "What this machine offers, and which targets build and run here.",
}


def _underscores(name: str) -> str:
    """Options and choices are the same with `_` and `-`."""
    return name.replace("-", "_")


CONTEXT = {"token_normalize_func": _underscores, "help_option_names": ["-h", "--help"], "max_content_width": 110}


class Commands(click.Group):
    """Finds the command NAME in `ingot/cli/NAME.py`; answers a typo with the nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"ingot.cli.{cmd_name}").command
        assert isinstance(command, click.Command), f"ingot/cli/{cmd_name}.py must define command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {name!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Commands, context_settings=CONTEXT)
@click.option("--traceback", is_flag=True, help="Show where in ingot's code an error was raised.")
@click.version_option(ingot.__version__, prog_name="ingot")
def group(traceback: bool) -> None:
    """Ahead-of-time compiler and runtime for large language models.

    \b
    ingot quickstart
    ingot convert --model_dir MODEL --output_dir CHECKPOINT
    ingot build --checkpoint_dir CHECKPOINT --output_dir ENGINE
    ingot run --engine_dir ENGINE --prompt "Once upon a time"
    """


def _failed(text: str) -> int:
    """Print what went wrong and the next step; the exit code of failed work."""
    print(f"error: {text}", file=sys.stderr)
    return 1


def _os_error(error: OSError) -> IngotError:
    where = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else None
    hint = "free some space or choose another directory" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    return IngotError((error.strerror or str(error)).lower(), where=where, hint=hint)


def _foreseen(error: Exception) -> int:
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, UsageError):
        _failed(str(error))
        return 2
    if isinstance(error, IngotError):
        return _failed(str(error))
    if isinstance(error, OSError):
        return _failed(str(_os_error(error)))
    if isinstance(error, MemoryError):
        return _failed(
            str(IngotError("out of memory", hint="close other programs, or lower the limits and batch sizes"))
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return _failed(
        str(
            IngotError(
                "ingot itself is wrong here, not what you asked for",
                where=f"{frame.filename}:{frame.lineno} in {frame.name}",
                got=f"{type(error).__name__}: {error}",
                hint="report this with the output of `ingot --traceback ...`",
            )
        )
    )


def run(args: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = group.main(list(args), prog_name="ingot", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if "--traceback" in args:
            traceback.print_exc()
        return _foreseen(error)


class _Terminated(SystemExit):
    """By a signal."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """What works clears up after itself, as after Ctrl-C; a second signal ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise _Terminated(128 + number)


def main() -> None:
    """The console script."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        code = run(sys.argv[1:])
    except _Terminated:  # said here: the signal may have hit while something else prints
        print("terminated", file=sys.stderr)
        raise
    sys.exit(code)
