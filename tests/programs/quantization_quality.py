"""What calibration is worth: perplexity and KL of `ingot quantize`'s Checkpoints beside those of plain builds.

python -m tests.programs.quantization_quality MODEL_DIR TEXT [--all] [--calibration FILE] [--recipe R ...]

How TEXT is read: `tests/programs/text_quality.py`. search: a build that quantises without a text. --all also shows
each way of rounding by itself.
"""

import argparse
import tempfile
from pathlib import Path

from ingot.builder.build import build
from ingot.builder.calibrated.quantize import quantize
from ingot.calibration_text import read_calibration
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import DEFAULT_TOKENS, RECIPES, WAYS, QuantizeOptions
from ingot.convert.convert import convert
from tests.programs.text_quality import TextQuality, windows_of

ALL = {"plain rounding": ("plain",), "nearest": ("nearest",), "GPTQ": ("gptq",), "GPTQ, folds": ("folded",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--all", action="store_true")
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

        print(f"{len(quality.targets)} tokens\n{quality.head('weights')}")
        row("`f32`", work / "checkpoint", BuildConfig(precision="f32"))
        for recipe in arguments.recipe or RECIPES:
            plain = "w8" if recipe == "w8a8" else recipe
            activations = "int8" if recipe == "w8a8" else "bf16" if arguments.all else "auto"
            if recipe != "f8":
                row(f"`{recipe}`, search", work / "checkpoint", BuildConfig(precision=plain, activations=activations))
            for what, ways in {**(ALL if arguments.all else {}), "`ingot quantize`": WAYS}.items():
                for codes in arguments.codes or ["auto", "symmetric", "asymmetric"]:
                    if codes != "auto" and plain in ("w8", "f8"):
                        continue
                    options = QuantizeOptions(
                        output_dir=work / "quantised",
                        precision=recipe,
                        codes=codes,
                        calibration_tokens=arguments.calibration_tokens,
                        ways=ways,
                    )
                    texts = read_calibration(arguments.calibration, work / "checkpoint")
                    quantize(options, work / "checkpoint", texts)
                    shown = f", {codes}" if len(arguments.codes or "all") > 1 else ""
                    row(f"`{recipe}`, {what}{shown}", work / "quantised", BuildConfig(activations=activations))


if __name__ == "__main__":
    main()
