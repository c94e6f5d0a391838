"""What each precision costs: bytes of packed weights, perplexity on a text, KL divergence from f32.

python -m tests.programs.precisions MODEL_DIR TEXT

TEXT is plain text, cut into windows of 256 tokens, or a JSON list, whose first 100 texts count up to 256 tokens each.
Every window starts with the model's first token.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.runtime import ModelRunner
from ingot.runtime.tokenizer import Tokenizer

WINDOW = 256
model, text = Path(sys.argv[1]), Path(sys.argv[2])
tokenizer = Tokenizer.from_dir(model)
first = json.loads((model / "generation_config.json").read_text())["bos_token_id"]
if text.suffix == ".json":
    texts = json.loads(text.read_text())[:100]
    parts = [tokenizer.encode(each, add_special_tokens=False)[: WINDOW - 1] for each in texts]
else:
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False)
    parts = [ids[begin : begin + WINDOW - 1] for begin in range(0, len(ids), WINDOW - 1)]
windows = [[first, *part] for part in parts]
targets = np.concatenate([window[1:] for window in windows])


def log_probs(engine: Path) -> npt.NDArray[np.float64]:
    """[tokens after the first of each window, vocab]"""
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(windows, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    rows: npt.NDArray[np.float64] = np.concatenate([logits[:-1] for logits in out["context_logits"]]).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


print(f"{len(targets)} tokens\n| precision | weights | perplexity | KL from f32 | same first choice |")
print("|---|---|---|---|---|")
with tempfile.TemporaryDirectory() as work:
    checkpoint = Path(work) / "checkpoint"
    convert(ConvertOptions(model_dir=model, output_dir=checkpoint))
    exact = None
    for precision in ("f32", "bf16", "w8", "w4g32", "w4g64", "w4g128"):
        report = build(BuildConfig(precision=precision), checkpoint, Path(work) / precision)
        found = log_probs(Path(work) / precision)
        exact = found if exact is None else exact
        perplexity = np.exp(-found[np.arange(len(targets)), targets].mean())
        divergence = (np.exp(exact) * (exact - found)).sum(axis=1).mean()
        same = (exact.argmax(axis=1) == found.argmax(axis=1)).mean()
        size = report.plan.weight_bytes / 1e6
        print(f"| `{precision}` | {size:.2f} MB | {perplexity:.3f} | {divergence:.5f} | {same:.1%} |", flush=True)
