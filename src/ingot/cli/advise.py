"""`ingot advise`: the front of size, speed and loss, as a table or JSON on stdout; the picked recipe as a file."""

import dataclasses
import json
import shlex
import tempfile
from pathlib import Path

import click

from ingot.advise.advise import advise
from ingot.advise.front import MIXTURES, TOKENS, Advice, AdviseOptions
from ingot.advise.measured import write_whole
from ingot.calibration_text import read_calibration
from ingot.checkpoint import is_checkpoint
from ingot.cli.console import LEVELS, CliConsole, wrapped
from ingot.cli.values import LocalPath, as_json, byte_size, log_level, positive
from ingot.configs.convert import ConvertOptions
from ingot.configs.sizes import format_bytes
from ingot.convert.convert import convert
from ingot.errors import UsageError
from ingot.step_table import aligned

_INPUTS = {"bf16": "floats", "int8": "int8"}


@click.command()
@click.option(
    "--model_dir",
    type=LocalPath(path_type=Path),
    required=True,
    help="Measure this Hugging Face directory, GGUF file or Checkpoint.",
)
@click.option(
    "--calibration",
    default="builtin",
    show_default=True,
    metavar="FILE|builtin",
    help="Measure losses on this text: a text file, or JSONL of texts and chats.",
)
@click.option(
    "--calibration_tokens",
    "tokens",
    type=positive,
    default=TOKENS,
    show_default=True,
    help="Use at most this many tokens of the text, beside the first token of each window of 512.",
)
@click.option(
    "--kl_budget",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Pick among recipes whose mean KL divergence from the exact model is at most this.",
)
@click.option(
    "--ppl_budget",
    type=click.FloatRange(min=1),
    metavar="X",
    help="Pick among recipes whose perplexity is at most this many times that of the exact model, e.g. 1.01.",
)
@click.option(
    "--memory",
    type=byte_size("--memory"),
    metavar="SIZE",
    help="Pick among recipes whose weights, with the KV cache of --batch sequences, take at most this, e.g. 4GiB.",
)
@click.option(
    "--batch",
    type=positive,
    default=1,
    show_default=True,
    help="Pick the fastest recipe for this many sequences that decode together.",
)
@click.option(
    "--context",
    type=positive,
    default=2048,
    show_default=True,
    help="With --memory: assume this many tokens of KV cache for each sequence.",
)
@click.option(
    "--pick", type=positive, metavar="N", help="Pick the recipe with this number in the table, instead of by budgets."
)
@click.option(
    "--output_recipe",
    type=LocalPath(path_type=Path),
    help="Write the picked recipe to this TOML file, for `ingot build --config`.",
)
@click.option(
    "--mixtures",
    type=click.IntRange(min=0),
    default=MIXTURES,
    show_default=True,
    help="Also try this many recipes that mix precisions by layer.",
)
@click.option(
    "--measured",
    type=LocalPath(path_type=Path),
    help="Keep the measurements in this file. Another run with it measures only what is missing.",
)
@click.option(
    "--work_dir",
    type=LocalPath(path_type=Path, exists=True, file_okay=False),
    help="Keep engines in this directory while they are measured. Default: the system's temporary directory.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Also print recipes that another one beats in size, speed and loss."
)
@as_json
@log_level
def command(
    model_dir: Path,
    calibration: str,
    output_recipe: Path | None,
    work_dir: Path | None,
    everything: bool,
    as_json: bool,
    log_level: str,
    **given: int | float | Path | None,
) -> None:
    """Measure which precisions suit a model: size, speed on this machine, and loss.

    Every recipe is built and measured. The table lists the recipes that no other one beats in size, speed and loss
    alike. KL and perplexity are measured on the calibration text, tokens per second by timed steps: for one sequence
    and for 32 that decode together.

    \b
    Example: ingot advise --model_dir Llama-3.2-1B --measured figures.json
    Example: ingot advise --model_dir Llama-3.2-1B --kl_budget 0.01 --output_recipe recipe.toml
    """
    options = AdviseOptions(**given)  # type: ignore[arg-type]
    if output_recipe is not None and not options.picks:
        raise UsageError(
            "--output_recipe has no recipe to write: none is picked",
            hint="add --kl_budget, --ppl_budget, --memory or --pick N",
        )
    with CliConsole(LEVELS[log_level]) as console, tempfile.TemporaryDirectory(dir=work_dir) as work:
        checkpoint = model_dir
        if not is_checkpoint(model_dir):
            checkpoint = Path(work) / "checkpoint"
            converted = convert(ConvertOptions(model_dir=model_dir, output_dir=checkpoint), console.progress_bytes)
            for warning in converted.warnings:
                console.warn(warning)
        texts = read_calibration(calibration, checkpoint)
        found = advise(options, checkpoint, texts, Path(work), console.progress, console.note)
        picked = None if found.picked is None else found.points[found.picked]
        if picked is not None and output_recipe is not None:
            write_whole(output_recipe, picked.recipe)
            console.note(f"wrote {output_recipe}: {picked.weights}, inputs {_INPUTS[picked.activations]}")
            console.note(
                f"  next    ingot build --config {shlex.quote(str(output_recipe))} --checkpoint_dir CHECKPOINT "
                "--output_dir ENGINE"
            )
    if as_json:
        print(json.dumps({"version": 1, **dataclasses.asdict(found)}, indent=1))
    else:
        print(wrapped("\n".join(_page(found, everything=everything))))


def _page(found: Advice, *, everything: bool) -> list[str]:
    batches = list(found.points[0].decode)
    lines = [
        f"{found.target}, {found.tokens:,} tokens of the text, perplexity of the exact model {found.perplexity:.3f}",
        "",
        *aligned([_heads(batches), *_rows(found, batches, everything=everything)], words=3),
        "",
        "weights and inputs: what int8 inputs change beside float inputs of the same weights",
        *aligned([("weights", *(f"batch {each}" for each in batches), "KL"), *_changes(found, batches)], words=1),
    ]
    if found.checks:
        lines += ["", "tokens/s of whole requests beside what steps foretold"]
        heads = ("weights", "batch", "foretold", "requests", "off")
        rows = [
            (
                each.weights,
                str(each.batch),
                f"{each.predicted:,.1f}",
                f"{each.measured:,.1f}",
                f"{each.predicted / each.measured - 1:+.0%}",
            )
            for each in found.checks
        ]
        lines += aligned([heads, *rows], words=1)
    return lines


def _heads(batches: list[int]) -> tuple[str, ...]:
    return ("", "weights", "inputs", "size", *(f"tok/s {each}" for each in batches), "prompt", "KL", "perplexity")


def _rows(found: Advice, batches: list[int], *, everything: bool) -> list[tuple[str, ...]]:
    shown = found.points if everything else found.front
    return [
        (
            f"{number if each.front else '-'}{' *' if number - 1 == found.picked else ''}",
            each.weights,
            _INPUTS[each.activations],
            format_bytes(each.nbytes),
            *(f"{each.decode[batch]:,.1f}" for batch in batches),
            f"{each.prefill:,.0f}",
            f"{each.kl:.5f}",
            f"{each.perplexity:.3f}",
        )
        for number, each in enumerate(shown, 1)
    ]


def _changes(found: Advice, batches: list[int]) -> list[tuple[str, ...]]:
    """The same weights with inputs of both kinds."""
    floats = {(each.weights, each.nbytes): each for each in found.points if each.activations == "bf16"}
    pairs = [(floats[each.weights, each.nbytes], each) for each in found.points if each.activations == "int8"]
    return [
        (
            int8.weights,
            *(f"x {int8.decode[batch] / plain.decode[batch]:.2f}" for batch in batches),
            f"{int8.kl - plain.kl:+.5f}",
        )
        for plain, int8 in sorted(pairs, key=lambda pair: pair[1].nbytes)
    ]
