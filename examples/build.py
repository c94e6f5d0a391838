"""Convert a Hugging Face directory and build an engine from Python, with a precision of its own for some layers.

python examples/build.py MODEL_DIR WORK_DIR      WORK_DIR gets two folders: checkpoint and engine
"""

import sys
from pathlib import Path

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.recipe import LayerRule
from ingot.convert.convert import convert

model, work = Path(sys.argv[1]), Path(sys.argv[2])
convert(ConvertOptions(model_dir=model, output_dir=work / "checkpoint"))

config = BuildConfig(
    target="cpu",  # the best instruction set of this machine
    precision="w4g64",
    lm_head_precision="w8",
    layers=(LayerRule(pattern="layers.*/down", precision="w8"),),  # names as `ingot inspect` lists them
    max_batch_size=8,
)
report = build(config, work / "checkpoint", work / "engine")
plan = report.plan
print(f"{work / 'engine'}: {len(plan.steps)} kernel calls, {plan.weight_bytes:,} bytes of weights")
