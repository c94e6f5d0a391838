"""`ingot inspect`: what lies in a Checkpoint, a graph or an Engine."""

from pathlib import Path

import click

from ingot.cli.console import wrapped
from ingot.cli.values import LocalPath, as_json
from ingot.inspect import inspect


@click.command()
@click.argument("path", type=LocalPath(path_type=Path))
@click.option(
    "--all", "everything", is_flag=True, help="Also print every weight and kernel call, and do not cut long lines."
)
@as_json
def command(path: Path, everything: bool, as_json: bool) -> None:
    """Show a Checkpoint, an ONNX graph or an Engine without loading weights.

    \b
    Example: ingot inspect engine
    """
    found = inspect(path)
    print(found.to_json() if as_json else found.text if everything else wrapped(found.summary))
