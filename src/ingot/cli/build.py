"""`ingot build`: Checkpoint to Engine. Reads TensorRT-LLM's spellings into one BuildConfig."""

from pathlib import Path
from typing import Any

import click

from ingot.builder.build import BuildReport, build
from ingot.checkpoint import Checkpoint
from ingot.cli.console import LEVELS, Talk
from ingot.cli.spellings import judge_all, spelling_options
from ingot.cli.values import WEIGHT_ONLY, byte_size, log_level, positive, weight_only
from ingot.configs.build import BuildConfig
from ingot.configs.convert import BuildDefaults
from ingot.configs.sizes import format_bytes
from ingot.errors import UsageError

_COMPUTE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # --gemm_plugin
_GPU_FAMILIES = ("cuda",)  # targets with float16 products


@click.command()
@click.option("--checkpoint_dir", type=click.Path(path_type=Path), required=True, help="Checkpoint to build from.")
@click.option("--output_dir", type=click.Path(path_type=Path), required=True, help="Engine to write.")
@click.option("--target", default="cpu", show_default=True, help="Kind of machine; `ingot doctor` lists them.")
@click.option(
    "--precision", help="Of the weights: f32, bf16, f16 (GPU); auto (the default) keeps what the checkpoint stores."
)
@click.option("--activations", type=click.Choice(["auto", "bf16", "int8"]), default="auto", show_default=True,
              help="What products round their inputs to; auto is the target's choice.")  # fmt: skip
@click.option("--lm_head_precision", help="Precision of the last product; only --precision's is possible yet.")
@click.option("--max_batch_size", type=positive, help="Requests running at once (64).")
@click.option("--max_input_len", type=positive, help="Prompt tokens of a request (2048).")
@click.option("--max_seq_len", type=positive, help="Prompt plus generated tokens of a request (4096).")
@click.option("--max_output_len", type=positive, help="Generated tokens: sets max_seq_len to max_input_len plus this.")
@click.option("--max_num_tokens", type=positive, help="Tokens of one step (2048).")
@click.option("--tokens_per_block", type=positive, default=32, show_default=True, help="Tokens per KV cache block.")
@click.option(
    "--kv_cache_dtype",
    default="auto",
    show_default=True,
    help="auto (the precision), f32, bf16, f16 (GPU); int8 and fp8 come later.",
)
@click.option("--tp_size", type=positive, help="Ranks that share each layer; only 1 yet.")
@click.option("--pp_size", type=positive, help="Ranks that share the layers; only 1 yet.")
@click.option("--config", type=click.Path(path_type=Path), help="A recipe (TOML): arrives later.")
@click.option("--max_mem", type=byte_size, metavar="SIZE", help="Memory that the build may use, e.g. 8GiB.")
@click.option("--no_autotune", is_flag=True, help="Time no kernels: how every build works yet.")
@click.option("--dry_run", is_flag=True, help="Decide everything, write nothing.")
@click.option("--dump_passes", type=click.Path(path_type=Path), metavar="DIR", help="Write the graph after each pass.")
@click.option(
    "--use_weight_only", is_flag=True, help="Weight-only precision: w8, or what --weight_only_precision says."
)
@click.option("--weight_only_precision", type=click.Choice(list(WEIGHT_ONLY)), help="int8 is w8, int4 is w4g128.")
@click.option("--gemm_plugin", type=click.Choice(["auto", "disable", *_COMPUTE]), default="auto", show_default=True,
              help="Compute type of products, so the precision; float16 runs as bf16 on CPUs.")  # fmt: skip
@spelling_options
@log_level
def command(checkpoint_dir: Path, output_dir: Path, log_level: str, **options: Any) -> None:
    """Checkpoint to Engine: passes, kernels, memory, packed weights.

    \b
    Example: ingot build --checkpoint_dir checkpoint --output_dir engine --precision bf16
    """
    with Talk(LEVELS[log_level]) as talk:
        for note in judge_all(options):
            talk.note(note)
        defaults = Checkpoint.open(checkpoint_dir).config.build_defaults
        report = build(_config(options, defaults, talk), checkpoint_dir, output_dir, talk.progress)
        _tell(report, talk)


def _config(options: dict[str, Any], defaults: BuildDefaults, talk: Talk) -> BuildConfig:
    """The options that became something; the rest is refused with a reason."""
    _refuse_later(options, defaults)
    precision = _precision(options, defaults, talk)
    lm_head = options["lm_head_precision"]
    if lm_head not in (None, precision):
        raise UsageError(
            "the last product has the precision of all others in this version",
            expected=f"--lm_head_precision {precision}",
            got=lm_head,
            hint="leave --lm_head_precision out",
        )
    if options["no_autotune"]:
        talk.note("--no_autotune: nothing is timed while building yet")
    kept = ("max_batch_size", "max_input_len", "max_seq_len", "max_output_len", "max_num_tokens", "tokens_per_block",
            "kv_cache_dtype", "max_mem", "dry_run", "dump_passes", "target")  # fmt: skip
    return BuildConfig(precision=precision, **{name: options[name] for name in kept})


def _refuse_later(options: dict[str, Any], defaults: BuildDefaults) -> None:
    for name in ("tp_size", "pp_size"):
        size = options[name] or getattr(defaults, name) or 1
        if size > 1:
            origin = "" if options[name] else ", recorded by convert"
            raise UsageError(
                f"--{name} {size}{origin}: an engine has one rank in this version", hint=f"give --{name} 1"
            )
    if options["activations"] != "auto":
        raise UsageError(
            f"--activations {options['activations']} cannot be chosen yet",
            expected="auto",
            hint="f32 products keep their inputs in f32, bf16 products round them where the target's kernels do",
        )
    if options["config"] is not None:
        raise UsageError("recipes do not exist yet", where=str(options["config"]), hint="use --precision")


def _precision(options: dict[str, Any], defaults: BuildDefaults, talk: Talk) -> str:
    given = {
        "--precision": options["precision"],
        "--use_weight_only": weight_only(options["use_weight_only"], options["weight_only_precision"]),
    }
    gemm = _COMPUTE.get(options["gemm_plugin"])
    on_gpu = options["target"].split("/")[0] in _GPU_FAMILIES
    if gemm == "f16" and not on_gpu:
        gemm = "bf16"
        talk.note("--gemm_plugin float16: CPU targets compute float16 models in bf16")
    if not given["--use_weight_only"]:  # where weights are quantised, it is the type of the other side
        given["--gemm_plugin"] = gemm
    chosen = {option: value for option, value in given.items() if value is not None}
    if len(set(chosen.values())) > 1:
        said = ", ".join(f"{option} says {value}" for option, value in chosen.items())
        raise UsageError("these options ask for different precisions", got=said, hint="keep one of them")
    if options["gemm_plugin"] == "disable":
        talk.note("--gemm_plugin disable: ingot has no other matrix products; --precision sets their type")
    return next(iter(chosen.values()), None) or defaults.precision or "auto"


def _tell(report: BuildReport, talk: Talk) -> None:
    for one in report.passes:
        talk.detail(f"pass {one}")
    for note in report.notes:
        (talk.warn if "NaN" in note else talk.note)(note)
    limits, done = report.plan.limits, "would be" if report.dry_run else "is"
    talk.note(
        f"{report.output_dir} {done} an engine for {report.target}: {report.precision}, "
        f"{format_bytes(report.engine_bytes)}, at most {limits.max_batch_size} requests, {limits.max_input_len} tokens "
        f"in, {limits.max_seq_len} in all, {limits.max_num_tokens} per step; {report.seconds:.1f} s"
    )
