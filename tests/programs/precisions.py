"""What each precision, and each type of the KV cache, costs: bytes, perplexity on a text, KL divergence from f32.

python -m tests.programs.precisions MODEL_DIR TEXT

How TEXT is read: `tests/programs/text_quality.py`.
"""

import sys
import tempfile
from pathlib import Path

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from tests.programs.text_quality import TextQuality, windows_of

model, text = Path(sys.argv[1]), Path(sys.argv[2])
quality = TextQuality(windows_of(model, text))
print(f"{len(quality.targets)} tokens\n{quality.head('precision')}")
with tempfile.TemporaryDirectory() as work:
    checkpoint = Path(work) / "checkpoint"
    convert(ConvertOptions(model_dir=model, output_dir=checkpoint))
    for precision in ("f32", "bf16", "w8", "w4g32", "w4g64", "w4g128"):
        report = build(BuildConfig(precision=precision), checkpoint, Path(work) / precision)
        print(quality.row(f"`{precision}`", report.plan.weight_bytes, Path(work) / precision), flush=True)
    print(f"\n{quality.head('KV cache of a token, weights in f32')}")
    for kv in ("f32", "bf16", "int8", "fp8"):
        config = BuildConfig(precision="f32", kv_cache_dtype=kv)
        plan = build(config, checkpoint, Path(work) / f"f32-{kv}").plan
        print(quality.row(f"`{kv}`", plan.block_bytes // plan.tokens_per_block, Path(work) / f"f32-{kv}"), flush=True)
