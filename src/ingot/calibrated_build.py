"""Checkpoint → Engine with calibrated weights, in one call: what `ingot quantize` and then `ingot build` do.

The quantised Checkpoint lies in a hidden directory beside the Engine and goes when the Engine is there. After an
interruption the next call of the same work takes the products that are made.

    .NAME.calibrated, ..NAME.calibrated.unfinished
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from ingot.builder.build import BuildReport, build
from ingot.builder.calibrated.quantize import quantize
from ingot.calibration_text import read_calibration
from ingot.configs.build import BuildConfig
from ingot.configs.quantize import DEFAULT_TOKENS, QuantizeOptions, read_recipe
from ingot.errors import UsageError
from ingot.plugins.target import Progress


def calibrated_build(
    config: BuildConfig,
    checkpoint_dir: Path,
    output_dir: Path,
    recipe: str,
    calibration: str = "builtin",
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
    *,
    tokens: int = DEFAULT_TOKENS,
) -> BuildReport:
    """recipe, calibration, tokens: as `ingot quantize` takes them; w8a8 builds with int8 inputs.

    Raises an IngotError: UsageError where the build asks for another precision than the recipe.
    """
    if config.precision != "auto" or config.layers:
        raise UsageError(
            "--recipe cannot be combined with --precision, --use_weight_only or --config",
            where="--recipe",
            expected="--recipe alone, which sets the precision of the weights",
            got=f"precision {config.precision}",
        )
    if config.dry_run:
        raise UsageError("--recipe cannot be combined with --dry_run", hint="leave --recipe or --dry_run out")
    precision, layers = read_recipe(recipe)
    if precision == "w8a8" and config.activations == "auto":
        config = dataclasses.replace(config, activations="int8")
    output = Path(output_dir)
    quantised = output.with_name(f".{output.name}.calibrated")
    options = QuantizeOptions(
        output_dir=quantised, precision=precision, layers=layers, calibration_tokens=tokens, max_mem=config.max_mem
    )
    try:
        report = quantize(options, checkpoint_dir, read_calibration(calibration, checkpoint_dir), progress, say)
        worst = max(report.products, key=lambda each: each.loss)
        count = len(report.products)
        say(f"quantised {count} matmuls; the largest error of outputs is {worst.loss:.2%}, of {worst.name}")
        for reason in report.left:
            say(f"not quantised: {reason}")
        return build(config, quantised, output, progress, say)
    finally:
        shutil.rmtree(quantised, ignore_errors=True)
