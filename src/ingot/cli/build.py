"""`ingot build`: Checkpoint to Engine. Reads TensorRT-LLM's spellings into one BuildConfig."""

import shlex
from pathlib import Path
from typing import Any

import click

from ingot.builder.build import BuildReport, build
from ingot.calibrated_build import calibrated_build
from ingot.checkpoint import Checkpoint
from ingot.cli.console import LEVELS, CliConsole
from ingot.cli.trtllm_compat import compat_options, judge_all
from ingot.cli.values import WEIGHT_ONLY, LocalPath, byte_size, is_weight_only, log_level, positive, weight_only
from ingot.configs.build import ACTIVATIONS, BuildConfig
from ingot.configs.convert import BuildDefaults
from ingot.configs.recipe import Recipe
from ingot.configs.sizes import format_bytes
from ingot.errors import UsageError
from ingot.plugins.cuda.estimate import estimates
from ingot.plugins.registry import find_targets
from ingot.plugins.target import JoinsRanks, RunsRanks, WithLibrary

_COMPUTE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # --gemm_plugin


@click.command()
@click.option("--checkpoint_dir", type=LocalPath(path_type=Path), required=True, help="Build from this Checkpoint.")
@click.option("--output_dir", type=LocalPath(path_type=Path), required=True, help="Write the Engine here.")
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    metavar="NAME,...",
    help="Build for these targets, e.g. cpu/avx2,cpu/avx512 in one engine. cpu is the best instruction set of "
    "this machine: name a target if the engine must run on another machine. See `ingot help targets`.",
)
@click.option(
    "--precision",
    help="Store weights as f32, bf16, f16 (GPU), w8, w4g128, w4g64 or w4g32; "
    "auto (the default) keeps floats, and integer codes of up to 8 bits and FP8; TensorRT targets store floats. "
    "See `ingot help precisions`.",
)
@click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    help="Round the inputs of matmuls to bf16 (where the target multiplies in bf16), int8 (per token, with "
    "quantised weights) or fp8 (per token or per 128 columns, with FP8 weights, on ref and on cuda/sm89 and newer), or "
    "keep them in f32. Default: auto, which is int8 where the error on a sample text is small, else bf16.",
)
@click.option(
    "--lm_head_precision",
    help="Store lm_head, the last matmul, in this precision, one of those of --precision. "
    "Default: w8 in w4 engines, else as --precision.",
)
@click.option(
    "--screen_lm_head",
    is_flag=True,
    help="Speed up greedy decoding of at most 4 sequences: store a w8 lm_head in 4 bits too, find the most "
    "likely tokens with these 4 bits, and compute only their logits exactly. The chosen tokens stay the "
    "same.",
)
@click.option("--max_batch_size", type=positive, help="Run at most this many requests at once. Default: 64.")
@click.option(
    "--max_input_len",
    type=positive,
    help="Accept prompts of at most this many tokens. Default: 2048, or what the model allows.",
)
@click.option(
    "--max_seq_len",
    type=positive,
    help="Accept requests of at most this many tokens, prompt and generated ones together. Default: 4096, or "
    "what the model allows.",
)
@click.option("--max_output_len", type=positive, help="Set max_seq_len to max_input_len plus this.")
@click.option(
    "--max_num_tokens",
    type=positive,
    help="Compute at most this many tokens in one step: prompt tokens, and one token of each request that "
    "decodes. Default: 2048.",
)
@click.option(
    "--tokens_per_block",
    type=positive,
    default=32,
    show_default=True,
    help="Allocate the KV cache in blocks of this many tokens.",
)
@click.option(
    "--kv_cache_dtype",
    default="auto",
    show_default=True,
    help="Store keys and values in this type: f32, bf16, f16 (GPU), int8 or fp8. int8 and fp8 take the same memory; "
    "int8 loses less. auto is bf16 in quantised engines, else the precision of the engine.",
)
@click.option(
    "--sum_parts",
    type=positive,
    help="Split the sums of matmuls that ranks share into this many parts, a power of two. Engines with "
    "the same --sum_parts compute identical logits, whatever their --tp_size. Default: --tp_size.",
)
@click.option(
    "--tp_size",
    type=positive,
    help="Divide each layer among this many ranks (processes, each with a GPU on cuda targets), a power of two. "
    "Default: 1.",
)
@click.option(
    "--pp_size",
    type=positive,
    help="Divide the layers among this many pipeline stages of --tp_size ranks each. Default: 1.",
)
@click.option(
    "--config",
    type=LocalPath(path_type=Path),
    metavar="FILE",
    help="Set precisions by layer, without calibration: a TOML file, w4_careful or w8_float_inputs.",
)
@click.option(
    "--recipe",
    metavar="NAME|FILE",
    help="Quantise with calibration before the build, as `ingot quantize --recipe` does: w4g128, w4g64, w4g32, "
    "w8, w8a8, or a TOML file with precisions by layer.",
)
@click.option(
    "--calibration",
    default="builtin",
    show_default=True,
    metavar="FILE|builtin",
    help="With --recipe: calibrate on this text file, or JSONL of texts and chats.",
)
@click.option(
    "--max_mem",
    type=byte_size("--max_mem"),
    metavar="SIZE",
    help="Refuse to start if the build needs more memory than this, e.g. 8GiB.",
)
@click.option(
    "--timing_cache",
    type=LocalPath(path_type=Path),
    metavar="FILE",
    help="Read kernel times from this file, and add those that this build measures. TensorRT's own times go to "
    "FILE.tensorrt-sm90 or the like.",
)
@click.option(
    "--no_autotune",
    is_flag=True,
    help="Do not time kernels. The build is faster, matmuls share their work among threads in the default way, "
    "and no speed is predicted.",
)
@click.option(
    "--no_compression",
    is_flag=True,
    help="Store bf16 weights in 16 bits. By default, engines for cpu/avx512bf16 store them in 12 bits if no value "
    "changes: decode of up to 8 sequences is faster, of 16 a few percent slower.",
)
@click.option(
    "--workers",
    type=positive,
    help="Pack weights in this many threads. Fewer need less memory; any number writes the same bytes. Default: one "
    "for each core.",
)
@click.option(
    "--draft_dir",
    type=LocalPath(path_type=Path),
    help="Build a draft model from this Checkpoint into the engine: a smaller model with the same vocabulary, for "
    "speculative decoding.",
)
@click.option(
    "--max_draft_len",
    type=positive,
    help="Let a step verify this many drafts of each request. Default: what 256 rows of logits leave.",
)
@click.option(
    "--refit", is_flag=True, help="Build an engine that `ingot refit` can give new weights of the same shapes."
)
@click.option("--dry_run", is_flag=True, help="Plan the engine and print the result, but write nothing.")
@click.option(
    "--dump_passes",
    type=LocalPath(path_type=Path),
    metavar="DIR",
    help="Write the graph as it is after each pass, one file per pass.",
)
@click.option("--use_weight_only", is_flag=True, help="Store weights as w8. The same as --precision w8.")
@click.option(
    "--weight_only_precision",
    type=click.Choice(list(WEIGHT_ONLY)),
    help="With --use_weight_only: store weights in this instead. int8 is w8, int4 is w4g128.",
)
@click.option(
    "--gemm_plugin",
    type=click.Choice(["auto", "disable", *_COMPUTE]),
    default="auto",
    show_default=True,
    help="Set the type of matmuls, and with it the precision of the weights. float16 runs as bf16 on CPUs. disable: "
    "compute all matmuls of cuda targets with ingot's own kernels, so that the engine needs no cuBLASLt.",
)
@compat_options
@log_level
def command(checkpoint_dir: Path, output_dir: Path, log_level: str, **options: Any) -> None:
    """Build an Engine from a Checkpoint: choose kernels, plan memory, pack weights.

    An earlier Engine in --output_dir is replaced when the new one is complete. Other files are never deleted: a
    directory that holds some is refused.

    \b
    Example: ingot build --checkpoint_dir checkpoint --output_dir engine --precision bf16
    """
    with CliConsole(LEVELS[log_level]) as console:
        for note in judge_all(options):
            console.note(note)
        defaults = Checkpoint.open(checkpoint_dir).config.build_defaults
        report = _build(_config(options, defaults, console), checkpoint_dir, output_dir, options, console)
        _tell(report, console)


def _build(
    config: BuildConfig, checkpoint_dir: Path, output_dir: Path, options: dict[str, Any], console: CliConsole
) -> BuildReport:
    """With calibrated weights where a recipe is given."""
    recipe, calibration = options["recipe"], options["calibration"]
    if recipe is not None:
        return calibrated_build(config, checkpoint_dir, output_dir, recipe, calibration, console.progress, console.note)
    if calibration != "builtin":
        raise UsageError(
            "--calibration needs --recipe", hint="give --recipe w4g128 or another one, or leave --calibration out"
        )
    return build(config, checkpoint_dir, output_dir, console.progress_bytes, console.note)


def _config(options: dict[str, Any], defaults: BuildDefaults, console: CliConsole) -> BuildConfig:
    """The options that became something; the rest is refused with a reason."""
    tp_size, pp_size = (_ranks(name, options, defaults) for name in ("tp_size", "pp_size"))
    recipe = Recipe.load(options["config"]) if options["config"] is not None else Recipe()
    precision = _precision(options, recipe, defaults)
    activations = _activations(options, recipe, precision)
    _note_gemm_plugin(options, console)
    head = _agreed("--lm_head_precision", options["lm_head_precision"], recipe.lm_head_precision)
    kept = (
        "max_batch_size",
        "max_input_len",
        "max_seq_len",
        "max_output_len",
        "max_num_tokens",
        "sum_parts",
        "tokens_per_block",
        "kv_cache_dtype",
        "max_mem",
        "workers",
        "draft_dir",
        "max_draft_len",
        "refit",
        "dry_run",
        "dump_passes",
        "target",
        "timing_cache",
        "screen_lm_head",
    )
    return BuildConfig(
        precision=precision,
        lm_head_precision=head,
        activations=activations,
        layers=recipe.layers,
        autotune=not options["no_autotune"],
        compress_weights=not options["no_compression"],
        gemm_library=options["gemm_plugin"] != "disable",
        tp_size=tp_size,
        pp_size=pp_size,
        **{name: options[name] for name in kept},
    )


def _agreed(option: str, given: str | None, recipe: str | None) -> str | None:
    """What the option or the recipe says."""
    if given is not None and recipe not in (None, given):
        raise UsageError(
            f"{option} contradicts the recipe",
            expected=f"{recipe}, as the recipe says",
            got=given,
            hint=f"leave {option} out, or change the recipe",
        )
    return given if given is not None else recipe


def _ranks(name: str, options: dict[str, Any], defaults: BuildDefaults) -> int:
    """--tp_size or --pp_size. Raises UsageError for targets that have one rank only."""
    ranked = all(isinstance(target, (RunsRanks, JoinsRanks)) for target in find_targets(options["target"]))
    size: int = options[name] or getattr(defaults, name) or 1
    if size > 1 and not ranked:
        said = "" if options[name] else "; it was set by ingot convert"
        raise UsageError(
            f"--{name} {size} is not supported on {options['target']}{said}",
            expected="1",
            hint=f"give --{name} 1; cpu and cuda targets and ref support more",
        )
    return size


def _precision(options: dict[str, Any], recipe: Recipe, defaults: BuildDefaults) -> str:
    given = {
        "--precision": options["precision"],
        "--config": recipe.precision,
        "--use_weight_only": weight_only(options["use_weight_only"], options["weight_only_precision"]),
    }
    if not is_weight_only(next((value for value in given.values() if value), defaults.precision)):
        given["--gemm_plugin"] = _compute(options)
    chosen = {option: value for option, value in given.items() if value is not None}
    if len(set(chosen.values())) > 1:
        said = ", ".join(f"{option} says {value}" for option, value in chosen.items())
        raise UsageError("options of this command ask for different precisions", got=said, hint="keep one of them")
    return next(iter(chosen.values()), None) or defaults.precision or "auto"


def _activations(options: dict[str, Any], recipe: Recipe, precision: str) -> str:
    """--gemm_plugin beside quantised weights is the type of the other side."""
    given = _agreed("--activations", options["activations"], recipe.activations)
    compute = _compute(options)
    if not is_weight_only(precision) or compute is None:
        return given or "auto"
    if compute != "bf16" or given not in (None, "bf16"):
        raise UsageError(
            "--gemm_plugin does not fit quantised weights",
            expected="bfloat16 or float16, with --activations bf16",
            got=f"{options['gemm_plugin']}, with --activations {given or 'auto'}",
            hint="leave --gemm_plugin out",
        )
    return compute


def _on_gpu(options: dict[str, Any]) -> bool:
    """Whether --gemm_plugin float16 can be taken literally. Raises UsageError where it would mean two things."""
    kinds = {target.on_gpu for target in find_targets(options["target"])}
    if len(kinds) > 1 and options["gemm_plugin"] == "float16":
        raise UsageError(
            "--gemm_plugin float16 means f16 on GPUs but bf16 on CPUs",
            where=f"--target {options['target']}",
            hint="give --precision, or build for CPUs and GPUs in two calls",
        )
    return True in kinds


def _compute(options: dict[str, Any]) -> str | None:
    """What --gemm_plugin asks products to compute in; None where it does not say."""
    return _COMPUTE.get(
        "bfloat16" if options["gemm_plugin"] == "float16" and not _on_gpu(options) else options["gemm_plugin"]
    )


def _note_gemm_plugin(options: dict[str, Any], console: CliConsole) -> None:
    if options["gemm_plugin"] == "float16" and not _on_gpu(options):
        console.note("--gemm_plugin float16: CPU targets compute float16 models in bf16")
    if options["gemm_plugin"] == "disable" and not any(
        isinstance(target, WithLibrary) for target in find_targets(options["target"])
    ):
        console.note("--gemm_plugin disable: only cuda targets use a library; --precision sets the type of matmuls")


def _tell(report: BuildReport, console: CliConsole) -> None:
    for line in dict.fromkeys(f"pass {one}" for target in report.targets for one in target.passes):
        console.detail(line)
    for line in (line for target in report.targets for line in target.timings):
        console.note(line)
    for note in report.notes:
        (console.warn if "NaN" in note else console.note)(note)
    for line in _result(report):
        console.note(line)


def _result(report: BuildReport) -> list[str]:
    """What was written, what it takes, how fast it will be, and the next command."""
    limits = report.plan.limits
    verb = "would write" if report.dry_run else "wrote"
    size = f"{format_bytes(report.engine_bytes)} in all, {report.seconds:.1f} s"
    targets = [
        f"{each.target}, weights in {each.precision} ({format_bytes(each.plan.weight_bytes)}), "
        f"KV cache in {each.plan.caches[0].dtype.value}"
        for each in report.targets
    ]
    lines = [f"{verb} {report.output_dir}: an engine for {len(targets)} targets, {size}"]
    if len(targets) == 1:
        lines = [f"{verb} {report.output_dir}: an engine for {targets[0]}, {size}"]
    else:
        lines += [f"  target  {kind}, in {each.file}" for each, kind in zip(report.targets, targets, strict=True)]
    lines += [
        f"  limits  {limits.max_batch_size:,} requests at once, {limits.max_input_len:,} prompt tokens, "
        f"{limits.max_seq_len:,} tokens in all, {limits.max_num_tokens:,} tokens per step",
        *(f"          {each}" for each in report.lowered),
    ]
    for each in report.targets:
        if each.prediction is not None:
            lines.append(
                f"  speed   {each.target}: {each.prediction}" if len(targets) > 1 else f"  speed   {each.prediction}"
            )
        lines += [f"  estimate  {one} (not measured)" for one in estimates(each.plan, each.target)]
    if not report.dry_run:
        names = ",".join(each.target for each in report.targets)
        here = any(target.run_blocker() is None for target in find_targets(names))
        run = f'ingot run --engine_dir {shlex.quote(str(report.output_dir))} --prompt "Once upon a time"'
        lines.append(f"  next    {run}" if here else f"  next    on a machine that runs {names}: {run}")
    return lines
