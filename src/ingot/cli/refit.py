"""`ingot refit`: new weights for an Engine."""

import shlex
from pathlib import Path

import click

from ingot.builder.refit import refit
from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, log_level
from ingot.configs.sizes import format_bytes


@click.command()
@click.option(
    "--engine_dir",
    type=LocalPath(path_type=Path),
    required=True,
    help="Give this Engine new weights. It must be built with --refit.",
)
@click.option(
    "--checkpoint_dir",
    type=LocalPath(path_type=Path),
    required=True,
    help="Take weights and tokenizer from this Checkpoint. Its graph, shapes and stored types must be those of the "
    "Checkpoint from which the Engine was built.",
)
@click.option(
    "--output_dir", type=LocalPath(path_type=Path), help="Write the new Engine here. Default: replace the old one."
)
@log_level
def command(engine_dir: Path, checkpoint_dir: Path, output_dir: Path | None, log_level: str) -> None:
    """Put new weights into an Engine, without a build.

    The result equals a new build with the same options. The old Engine stays whole until the new one is complete.

    \b
    Example: ingot refit --engine_dir engine --checkpoint_dir fine_tuned --output_dir engine2
    """
    with CliConsole(LEVELS[log_level]) as console:
        report = refit(engine_dir, checkpoint_dir, output_dir, console.progress_bytes, console.note)
        for note in report.notes:
            console.warn(note)
        console.note(
            f"wrote {report.output_dir}: new weights of {format_bytes(report.nbytes)} for "
            f"{', '.join(report.targets)}, {report.seconds:.1f} s"
        )
        console.note(
            f'  next    ingot run --engine_dir {shlex.quote(str(report.output_dir))} --prompt "Once upon a time"'
        )
