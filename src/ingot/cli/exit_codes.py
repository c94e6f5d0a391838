"""The exit codes of every command: only this table says what a code means and which error gives it."""

import click

from ingot.errors import UsageError

DONE, FAILED, WRONG_USE = 0, 1, 2
INTERRUPTED, READER_LEFT, TERMINATED = 130, 141, 143

EXIT_CODES = {
    DONE: "The work is done, and every check said yes.",
    FAILED: "The work failed, or a check said no: a file is damaged or not supported, this machine lacks something, "
    "memory or disk ran out, a request was refused, or an engine differs from its source.",
    WRONG_USE: "Change the command line: an option is unknown, missing or contradicts another one, a value cannot be, "
    "or does not fit the model or the engine, or a path does not exist or may not be written.",
    INTERRUPTED: "Ctrl-C (SIGINT) ended the command. `ingot serve` finishes running requests instead and exits with 0.",
    READER_LEFT: "The program that read the output has closed the pipe.",
    TERMINATED: "SIGTERM ended the command. `ingot serve` finishes running requests instead and exits with 0.",
}


def exit_code(error: BaseException) -> int:
    """The code with which a command ends that raised `error`."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return READER_LEFT
    return WRONG_USE if isinstance(error, UsageError | click.UsageError) else FAILED
