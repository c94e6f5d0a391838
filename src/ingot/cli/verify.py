"""`ingot verify`: is the Engine what was built?"""

import json
from pathlib import Path

import click

from ingot.cli.console import LEVELS, Talk
from ingot.cli.values import as_json, log_level
from ingot.configs.sizes import format_bytes
from ingot.verify import verify


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), metavar="SOURCE", help="Compare numbers: arrives later.")
@as_json
@log_level
def command(engine: Path, against: Path | None, as_json: bool, log_level: str) -> None:
    """Check every hash of an Engine.

    \b
    Example: ingot verify engine
    """
    with Talk(LEVELS[log_level]) as talk:
        report = verify(engine, against, talk.progress_bytes)
    if as_json:
        parts = {part.name: part.sha256 for part in report.manifest.parts}
        print(json.dumps({"engine": str(report.directory), "bytes": report.nbytes, "sha256": parts}, indent=1))
    else:
        print(
            f"{report.directory}: {len(report.manifest.parts)} parts, {format_bytes(report.nbytes)}, all hashes match"
        )
