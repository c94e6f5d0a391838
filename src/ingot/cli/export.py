"""`ingot export`: a Checkpoint as a file that other engines read."""

from pathlib import Path

import click

from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, log_level
from ingot.configs.sizes import format_bytes
from ingot.export.export import FORMATS, export


@click.command()
@click.option(
    "--checkpoint_dir",
    type=LocalPath(path_type=Path),
    required=True,
    help="Export this Checkpoint, an output of ingot quantize or convert.",
)
@click.option(
    "--output",
    type=LocalPath(path_type=Path),
    required=True,
    metavar="FILE|DIR",
    help="Write this .gguf file, or this directory of compressed-tensors.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    required=True,
    metavar="|".join(FORMATS),
    help="Write a GGUF file for llama.cpp, or a Hugging Face directory of compressed-tensors for transformers "
    "and vLLM.",
)
@click.option(
    "--as_floats",
    is_flag=True,
    help="If the format cannot hold the codes of a weight, write the weight as float32 numbers of the same values. "
    "Without this option, such a weight is refused.",
)
@log_level
def command(checkpoint_dir: Path, output: Path, form: str, as_floats: bool, log_level: str) -> None:
    """Export a Checkpoint, with tokenizer and settings, as a GGUF file or a directory of compressed-tensors.

    Codes and scales of quantised weights are written unchanged.

    \b
    Example: ingot export --checkpoint_dir quantised --output model.gguf --format gguf
    """
    with CliConsole(LEVELS[log_level]) as console:
        report = export(checkpoint_dir, output, form, as_floats=as_floats, progress=console.progress_bytes)
        for name in report.floats:
            console.warn(f"{name}: the format cannot hold its codes, so its values are float32")
        kinds = ", ".join(f"{count} tensors of {kind}" for kind, count in sorted(report.kinds.items()))
        console.note(f"wrote {report.output}: {format_bytes(report.nbytes)}, {kinds}")
