"""`ingot convert`: Hugging Face directory to Checkpoint."""

import shlex
from pathlib import Path

import click

from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.values import WEIGHT_ONLY, LocalPath, byte_size, log_level, weight_only
from ingot.configs.convert import ROPE_FACTORS, WEIGHT_DTYPES, BuildDefaults, ConvertOptions
from ingot.configs.sizes import format_bytes
from ingot.convert.convert import convert


@click.command()
@click.option(
    "--model_dir",
    type=LocalPath(path_type=Path),
    help="Convert this Hugging Face directory or GGUF file. Required unless --config is given.",
)
@click.option("--output_dir", type=LocalPath(path_type=Path), required=True, help="Write the Checkpoint here.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *WEIGHT_DTYPES], case_sensitive=False),
    default="auto",
    show_default=True,
    help="Store weights in this type; auto keeps the type of each.",
)
@click.option(
    "--lora",
    type=LocalPath(path_type=Path),
    metavar="DIR",
    help="Merge this LoRA adapter into the model of --model_dir: a directory with adapter_config.json, as PEFT "
    "saves it.",
)
@click.option(
    "--rope_factors",
    type=click.Choice(ROPE_FACTORS),
    help="Choose the rotary factors of longrope models (Phi 3 128k): "
    "short for texts up to the original positions, long for texts of any length. Default: short, which limits the "
    "model to the original positions (4,096 in Phi 3).",
)
@click.option(
    "--max_mem",
    type=byte_size("--max_mem"),
    metavar="SIZE",
    help="Refuse to start if the conversion needs more memory than this, e.g. 8GiB.",
)
@click.option(
    "--config",
    type=LocalPath(path_type=Path),
    help="Convert this config.json, a model without weights. Needs --random_weights.",
)
@click.option(
    "--random_weights",
    type=int,
    metavar="SEED",
    help="Fill the model of --config with random weights from this seed, e.g. to measure speed.",
)
@click.option(
    "--use_weight_only", is_flag=True, help="Make w8 the default --precision of `ingot build` for this Checkpoint."
)
@click.option(
    "--weight_only_precision",
    type=click.Choice(list(WEIGHT_ONLY)),
    help="With --use_weight_only: make w8 (int8) or w4g128 (int4) the default --precision of `ingot build`.",
)
@click.option(
    "--tp_size",
    type=click.IntRange(min=1),
    help="Store this number as the default --tp_size of `ingot build`, which divides each layer among this many ranks.",
)
@click.option(
    "--pp_size",
    type=click.IntRange(min=1),
    help="Store this number as the default --pp_size of `ingot build`, which divides the layers among this many "
    "pipeline stages.",
)
@log_level
def command(
    model_dir: Path | None,
    output_dir: Path,
    dtype: str,
    lora: Path | None,
    rope_factors: str | None,
    max_mem: int | None,
    config: Path | None,
    random_weights: int | None,
    use_weight_only: bool,
    weight_only_precision: str | None,
    tp_size: int | None,
    pp_size: int | None,
    log_level: str,
) -> None:
    """Convert a Hugging Face directory or GGUF file to a Checkpoint: weights and a standard ONNX graph.

    \b
    Example: ingot convert --model_dir Llama-3.2-1B --output_dir checkpoint
    Example: ingot convert --model_dir Llama-3.2-1B --lora my-adapter --output_dir checkpoint
    """
    options = ConvertOptions(
        output_dir=output_dir,
        model_dir=model_dir,
        config=config,
        random_weights=random_weights,
        dtype=WEIGHT_DTYPES.get(dtype),
        max_mem=max_mem,
        rope_factors=rope_factors,
        lora=lora,
        build_defaults=BuildDefaults(
            precision=weight_only(use_weight_only, weight_only_precision), tp_size=tp_size, pp_size=pp_size
        ),
    )
    with CliConsole(LEVELS[log_level]) as console:
        report = convert(options, console.progress_bytes, console.note)
        for warning in report.warnings:
            console.warn(warning)
        console.note(
            f"wrote {report.output_dir}: a Checkpoint of a {report.model.family} model, {report.tensors} tensors, "
            f"{format_bytes(report.nbytes)}, {report.seconds:.1f} s"
        )
        console.note(
            f"  next    ingot build --checkpoint_dir {shlex.quote(str(report.output_dir))} --output_dir ENGINE"
        )
