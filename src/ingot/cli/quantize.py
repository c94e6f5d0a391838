"""`ingot quantize`: a model to a Checkpoint with calibrated weights."""

import dataclasses
import json
import shlex
import tempfile
from pathlib import Path

import click

from ingot.builder.calibrated.quantize import quantize
from ingot.calibration_text import read_calibration
from ingot.checkpoint import is_checkpoint
from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import LocalPath, as_json, byte_size, log_level, positive
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import CODES, DEFAULT_TOKENS, QuantizeOptions, read_recipe
from ingot.convert.convert import convert


@click.command()
@click.option(
    "--model_dir",
    type=LocalPath(path_type=Path),
    required=True,
    help="Quantise this Hugging Face directory, GGUF file or Checkpoint.",
)
@click.option("--output_dir", type=LocalPath(path_type=Path), required=True, help="Write the Checkpoint here.")
@click.option(
    "--recipe",
    required=True,
    metavar="NAME|FILE",
    help="Quantise to w4g128, w4g64, w4g32, w8, w8a8 or f8, or by layer with a TOML file.",
)
@click.option(
    "--calibration",
    default="builtin",
    show_default=True,
    metavar="FILE|builtin",
    help="Calibrate on this text: a text file, or JSONL of texts and chats.",
)
@click.option(
    "--calibration_tokens",
    type=positive,
    default=DEFAULT_TOKENS,
    show_default=True,
    help="Use at most this many tokens of the text, beside the first token of each window of 512.",
)
@click.option(
    "--codes",
    type=click.Choice(CODES),
    default="auto",
    show_default=True,
    help="Choose what 4-bit codes stand for: whole numbers (symmetric), whole numbers minus a zero point "
    "(asymmetric), or, matmul by matmul, the better of symmetric and a table of values (auto).",
)
@click.option(
    "--max_mem",
    type=byte_size("--max_mem"),
    metavar="SIZE",
    help="Refuse to start if the work needs more memory than this, e.g. 8GiB.",
)
@as_json
@log_level
def command(
    model_dir: Path,
    output_dir: Path,
    recipe: str,
    calibration: str,
    calibration_tokens: int,
    codes: str,
    max_mem: int | None,
    as_json: bool,
    log_level: str,
) -> None:
    """Quantise a model with a calibration text, and write a Checkpoint.

    If a run is interrupted, run the same command again: it continues.

    \b
    Example: ingot quantize --model_dir Llama-3.2-1B --output_dir quantised --recipe w4g128
    """
    precision, layers = read_recipe(recipe)
    options = QuantizeOptions(
        output_dir=output_dir,
        precision=precision,
        layers=layers,
        codes=codes,
        calibration_tokens=calibration_tokens,
        max_mem=max_mem,
    )
    with CliConsole(LEVELS[log_level]) as console, tempfile.TemporaryDirectory(prefix="ingot-quantize-") as work:
        checkpoint = model_dir
        if not is_checkpoint(model_dir):
            checkpoint = Path(work) / "checkpoint"
            converted = convert(
                ConvertOptions(model_dir=model_dir, output_dir=checkpoint, max_mem=max_mem), console.progress_bytes
            )
            for warning in converted.warnings:
                console.warn(warning)
        texts = read_calibration(calibration, checkpoint)
        report = quantize(options, checkpoint, texts, console.progress, console.note)
        for each in report.products:
            console.detail(f"{each.name}: {each.format}, error of outputs {each.loss:.2%} (nearest: {each.plain:.2%})")
        for reason in report.left:
            console.warn(f"not quantised: {reason}")
        worst = max(report.products, key=lambda each: each.loss)
        console.note(
            f"wrote {report.output_dir}: {len(report.products)} matmuls quantised on {report.tokens} tokens; "
            f"the largest error of outputs is {worst.loss:.2%}, of {worst.name} (rounded to the nearest: "
            f"{worst.plain:.2%})"
        )
        inputs = " --activations int8" if precision == "w8a8" else ""
        console.note(
            f"  next    ingot build --checkpoint_dir {shlex.quote(str(report.output_dir))} --output_dir ENGINE{inputs}"
        )
    if as_json:
        print(json.dumps({"version": 1, **dataclasses.asdict(report), "output_dir": str(output_dir)}, indent=1))
