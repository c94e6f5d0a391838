"""What calibration is worth: perplexity and KL of `ingot quantize`'s Checkpoints beside those of plain builds.

python -m tests.programs.quantization_quality MODEL_DIR TEXT [--calibration FILE] [--recipe R ...] [--codes C ...]

TEXT is read as by `tests.programs.precisions`; so are windows and the meaning of the columns. nearest: a build that
quantises without data, by today's search.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.build import build
from ingot.builder.calibrated.quantize import quantize
from ingot.calibration_text import read_calibration
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import DEFAULT_TOKENS, RECIPES, QuantizeOptions
from ingot.convert.convert import convert
from ingot.runtime import ModelRunner
from ingot.runtime.tokenizer import Tokenizer

WINDOW = 256


def windows_of(model: Path, text: Path) -> list[list[int]]:
    """Token ids, each window with the model's first token before it."""
    tokenizer = Tokenizer.from_dir(model)
    first = json.loads((model / "generation_config.json").read_text())["bos_token_id"]
    if text.suffix == ".json":
        texts = json.loads(text.read_text())[:100]
        parts = [tokenizer.encode(each, add_special_tokens=False)[: WINDOW - 1] for each in texts]
    else:
        ids = tokenizer.encode(text.read_text(), add_special_tokens=False)
        parts = [ids[begin : begin + WINDOW - 1] for begin in range(0, len(ids), WINDOW - 1)]
    return [[first, *part] for part in parts]


def log_probs(engine: Path, windows: list[list[int]]) -> npt.NDArray[np.float64]:
    """[tokens after the first of each window, vocab]"""
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(windows, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    rows: npt.NDArray[np.float64] = np.concatenate([logits[:-1] for logits in out["context_logits"]]).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--calibration", default="builtin")
    parser.add_argument("--calibration_tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--codes", action="append")
    arguments = parser.parse_args()
    windows = windows_of(arguments.model, arguments.text)
    targets = np.concatenate([window[1:] for window in windows])
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        convert(ConvertOptions(model_dir=arguments.model, output_dir=work / "checkpoint"))
        exact: npt.NDArray[np.float64] | None = None

        def row(what: str, checkpoint: Path, config: BuildConfig) -> None:
            nonlocal exact
            report = build(config, checkpoint, work / "engine")
            found = log_probs(work / "engine", windows)
            exact = found if exact is None else exact
            perplexity = np.exp(-found[np.arange(len(targets)), targets].mean())
            divergence = (np.exp(exact) * (exact - found)).sum(axis=1).mean()
            same = (exact.argmax(axis=1) == found.argmax(axis=1)).mean()
            size = report.plan.weight_bytes / 1e6
            print(f"| {what} | {size:.2f} MB | {perplexity:.3f} | {divergence:.5f} | {same:.1%} |", flush=True)

        print(f"{len(targets)} tokens\n| weights | size | perplexity | KL from f32 | same first choice |")
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
