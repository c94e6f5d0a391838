"""What calibration is worth: perplexity and KL of `ingot quantize`'s Checkpoints beside those of plain builds.

python -m tests.programs.quantization_quality MODEL_DIR TEXT [--calibration FILE] [--recipe R ...] [--codes C ...]

How TEXT is read: `tests/programs/text_quality.py`. search: a build that quantises without a text.
"""

import argparse
import tempfile
from pathlib import Path

from ingot.builder.build import build
from ingot.builder.calibrated.quantize import quantize
from ingot.calibration_text import read_calibration
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import DEFAULT_TOKENS, RECIPES, QuantizeOptions
from ingot.convert.convert import convert
from tests.programs.text_quality import TextQuality, windows_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--calibration", default="builtin")
    parser.add_argument("--calibration_tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--codes", action="append")
    arguments = parser.parse_args()
    quality = TextQuality(windows_of(arguments.model, arguments.text))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        convert(ConvertOptions(model_dir=arguments.model, output_dir=work / "checkpoint"))

        def row(what: str, checkpoint: Path, config: BuildConfig) -> None:
            report = build(config, checkpoint, work / "engine")
            print(quality.row(what, report.plan.weight_bytes, work / "engine"), flush=True)

        print(f"{len(quality.targets)} tokens\n| weights | size | perplexity | KL from f32 | same first choice |")
        print("|---|---|---|---|---|")
        row("`f32`", work / "checkpoint", BuildConfig(precision="f32"))
        for recipe in arguments.recipe or RECIPES:
            plain = recipe.removesuffix("a8")
            activations = "int8" if recipe == "w8a8" else "auto"
            row(f"`{plain}`, search", work / "checkpoint", BuildConfig(precision=plain, activations=activations))
            for codes in arguments.codes or ["auto", "symmetric", "asymmetric"]:
                if codes != "auto" and plain == "w8":
                    continue
                options = QuantizeOptions(
                    output_dir=work / "quantised",
                    precision=recipe,
                    codes=codes,
                    calibration_tokens=arguments.calibration_tokens,
                )
                quantize(options, work / "checkpoint", read_calibration(arguments.calibration, work / "checkpoint"))
                row(f"`quantize --recipe {recipe}`, {codes}", work / "quantised", BuildConfig(activations=activations))


if __name__ == "__main__":
    main()
