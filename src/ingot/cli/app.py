"""The group of commands: names and typos, and how an error becomes words. `exit_codes` has the codes."""

import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import click
from click.exceptions import NoArgsIsHelpError
from click.shell_completion import CompletionItem

import ingot
from ingot.cli.absent_options import ABSENT, NOT_YET
from ingot.cli.console import terminal_width, wrapped
from ingot.cli.exit_codes import READER_LEFT, TERMINATED, exit_code
from ingot.cli.llama_cpp_flags import LLAMA_CPP
from ingot.cli.other_flags import canonical
from ingot.cli.vllm_flags import VLLM
from ingot.errors import IngotError

COMMANDS = {
    "quickstart": "Convert, build and run the small model that ships with ingot.",
    "convert": "Convert a Hugging Face directory or GGUF file to a Checkpoint.",
    "quantize": "Quantise a model with a calibration text.",
    "advise": "Measure which precisions suit a model: size, speed and loss.",
    "plan": "Predict TTFT, TPOT, tokens/s and cost of a model on devices.",
    "build": "Build an Engine from a Checkpoint.",
    "refit": "Put new weights into an Engine, without a build.",
    "export": "Export a Checkpoint as GGUF or compressed-tensors.",
    "run": "Generate text with an Engine.",
    "serve": "Serve an Engine over HTTP, OpenAI-compatible.",
    "bench": "Measure latency and throughput of an Engine.",
    "inspect": "Show what a Checkpoint, an ONNX graph or an Engine holds.",
    "verify": "Check an Engine's hashes, and with --against what it computes.",
    "doctor": "Show what this machine offers and which targets it supports.",
    "help": "Explain a topic: exit_codes, limits, memory, precisions, targets, ...",
    "completion": "Print a completion script for bash, zsh or fish.",
}


def _underscores(name: str) -> str:
    """Options and choices are the same with `_` and `-`."""
    return name.replace("-", "_")


CONTEXT = {"token_normalize_func": _underscores, "help_option_names": ["-h", "--help"], "max_content_width": 100}


def _short_names(command: click.Command) -> None:
    """Help says `--port N` and `--min_p X`, not `INTEGER RANGE` and `FLOAT`."""
    for each in command.params:
        if each.metavar is None and isinstance(each, click.Option) and not each.is_flag:
            each.metavar = _SHORT.get(each.type.name)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _short_names(inner)


_SHORT = {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}


class Commands(click.Group):
    """Finds the command NAME in `ingot/cli/NAME.py`; answers a typo with the nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"ingot.cli.{cmd_name}").command
        assert isinstance(command, click.Command), f"ingot/cli/{cmd_name}.py must define command"
        _short_names(command)
        command.epilog = command.epilog or "`ingot help exit_codes` says what each exit code means."
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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names alone: importing every command for its help would take a second."""
        names = [CompletionItem(name, help=words) for name, words in COMMANDS.items() if name.startswith(incomplete)]
        return names or click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        found = importlib.import_module("ingot.build_info").read_build_info()
        print(f"ingot, version {ingot.__version__}")
        print("\n".join(f"{name:<9} {value}" for name, value in found.items()))
        context.exit()


@click.group(cls=Commands, context_settings=CONTEXT)
@click.option("--traceback", is_flag=True, help="Show where in ingot's code an error was raised.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show version and build."
)
def group(traceback: bool) -> None:
    """Ahead-of-time compiler and runtime for large language models.

    \b
    ingot quickstart
    ingot convert --model_dir MODEL --output_dir CHECKPOINT
    ingot build --checkpoint_dir CHECKPOINT --output_dir ENGINE
    ingot run --engine_dir ENGINE --prompt "Once upon a time"
    """


_CLICK_WORDS = {
    "is not a valid integer range": "is not a whole number",
    "is not a valid float range": "is not a number",
    "is not a valid float": "is not a number",
}


def _os_error(error: OSError) -> IngotError:
    where = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else None
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space or choose another directory" if full else "look at the path and its permissions"
    return IngotError(
        "a file cannot be read or written", where=where, got=(error.strerror or str(error)).lower(), hint=hint
    )


def _near(name: str, known: Sequence[str]) -> str | None:
    """The option that somebody meant: one that is spelled nearly alike, or has all words of this one."""
    words = set(name.strip("-").split("_"))
    containing = [each for each in known if words <= set(each.strip("-").split("_"))]
    close = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    return next(iter([*close, *containing]), None)


_ALIKE = 0.8  # of difflib: --promt is --prompt, but --max_model_len is not --max_body_size
_OTHER_PROGRAMS = (("vLLM", VLLM), ("llama.cpp", LLAMA_CPP))
_GENERATING = ("serve", "run", "build", "convert", "quantize")


def _as_typed(letter: str, args: Sequence[str]) -> Iterator[str]:
    """The flag of one dash that click has cut to its letter: -ngl for -n."""
    for each in args:
        if each.startswith("-") and not each.startswith("--") and letter[1:] in each:
            yield each.split("=")[0]
    yield letter


def _other_program(name: str, command: str, args: Sequence[str]) -> IngotError | None:
    """The answer to an option of TensorRT-LLM, vLLM or llama.cpp."""
    plain, found = name.strip("-").replace("-", "_"), None
    if plain in ABSENT:
        found = IngotError(f"--{plain} is an option of TensorRT-LLM that ingot does not have", hint=ABSENT[plain])
    if command == "build" and plain in NOT_YET:
        return IngotError(f"there is no option --{plain} yet", hint=NOT_YET[plain])
    if command in ("build", "convert") and found is not None:
        return found
    if command not in _GENERATING:
        return None
    for typed in [name] if name.startswith("--") else _as_typed(name, args):
        for program, rows in _OTHER_PROGRAMS:
            for row in rows:
                if canonical(typed) in row.names():
                    return IngotError(f"{typed} is an option of {program} that ingot does not have", hint=row.hint())
    return found if command == "serve" else None


def _of_another_command(name: str, context: click.Context) -> str | None:
    """The command of the group that has this option."""
    group = context.find_root().command
    assert isinstance(group, click.Group), "ingot is a group of commands"
    for each in _GENERATING:
        command = group.get_command(context, each)
        if command is not None and any(name in option.opts for option in command.params):
            return each
    return None


def _no_such_option(error: click.NoSuchOption, context: click.Context, args: Sequence[str]) -> IngotError:
    name, hint = error.option_name, f"`{context.command_path} --help` lists the options"
    if (answer := _other_program(name, context.info_name or "", args)) is not None:
        return answer
    known = [option for param in context.command.params for option in param.opts if option.startswith("--")]
    if near := _near(name, known):
        return IngotError(f"there is no option {name}: did you mean {near}?", hint=hint)
    if name.startswith("--") and (other := _of_another_command(name, context)) is not None:
        return IngotError(
            f"{name} is an option of `ingot {other}`, not of `{context.command_path}`",
            hint=f"give it to `ingot {other}`, or choose from the options in `{context.command_path} --help`",
        )
    return IngotError(f"there is no option {name}", hint=hint)


def _usage_error(error: click.ClickException, args: Sequence[str]) -> IngotError:
    """click's words in the form of ours; an option of another program gets ingot's way."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        return _no_such_option(error, context, args)
    words = error.format_message().strip().removesuffix(".")
    for theirs, plain in _CLICK_WORDS.items():
        words = words.replace(theirs, plain)
    of_group = context is not None and isinstance(context.command, click.Group)
    what = "commands" if of_group else "options"
    hint = None if context is None else f"`{context.command_path} --help` lists the {what}"
    if "No such file" in words:
        hint = "look at how the path is spelled"
    return IngotError(words[:1].lower() + words[1:], hint=hint)


def _in_words(error: Exception, args: Sequence[str]) -> IngotError:
    if isinstance(error, IngotError):
        return error
    if isinstance(error, click.ClickException):
        return _usage_error(error, args)
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, MemoryError):
        return IngotError("out of memory", hint="close other programs, or lower the limits and batch sizes")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return IngotError(
        "internal error: a bug of ingot, not a mistake in your command",
        where=f"{frame.filename}:{frame.lineno} in {frame.name}",
        got=f"{type(error).__name__}: {error}",
        hint="report this with the output of `ingot --traceback ...`",
    )


def run(args: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = group.main(list(args), prog_name="ingot", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort) as error:
        print("interrupted", file=sys.stderr)
        return exit_code(error)
    except BrokenPipeError:  # the reader of our output left: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except NoArgsIsHelpError as error:  # its words are the help
        print(error.format_message(), file=sys.stderr)
        return exit_code(error)
    except Exception as error:
        if "--traceback" in args:
            traceback.print_exc()
        print(wrapped(f"error: {_in_words(error, args)}", terminal_width(sys.stderr)), file=sys.stderr)
        return exit_code(error)


class _Terminated(SystemExit):
    """By a signal."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """What works clears up after itself, as after Ctrl-C; a second signal ends at once."""
    signal.signal(number, signal.SIG_DFL)
    raise _Terminated(TERMINATED)


class _Interrupted(KeyboardInterrupt):
    """By Ctrl-C. Had Python's own class left an `eval`, `python -m ingot` would end by the signal, without our code."""


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise _Interrupted


def main() -> None:
    """The console script."""
    if sys.stdout is None:  # closed from the start: nobody reads what we say there
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        code = run(sys.argv[1:])
    except _Terminated:  # said here: the signal may have hit while something else prints
        print("terminated", file=sys.stderr)
        _tell_launcher(TERMINATED)
        raise
    _tell_launcher(code)
    sys.exit(code)


def _tell_launcher(code: int) -> None:
    """With several ranks mpirun ends, too, and with this code. Only a command that opens an engine has loaded it."""
    if (ranks := sys.modules.get("ingot.runtime.distributed")) is not None:
        ranks.end_with(code)
