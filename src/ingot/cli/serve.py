"""`ingot serve`: named in the contract, refused until the server exists."""

import click

from ingot.errors import IngotError


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--engine_dir", metavar="E", help="Engine directory.")
@click.argument("others", nargs=-1, type=click.UNPROCESSED)
def command(engine_dir: str | None, others: tuple[str, ...]) -> None:
    """OpenAI-compatible HTTP server: arrives in a later version.

    \b
    Example: ingot run --engine_dir ENGINE --input_file requests.jsonl --json
    """
    raise IngotError(
        "ingot serve does not exist in this version",
        hint="use `ingot run --engine_dir E --input_file requests.jsonl --json`, or ModelRunner in Python",
    )
