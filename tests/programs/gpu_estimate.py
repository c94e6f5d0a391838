"""How long the steps of a GPU engine should take, at any device and batch; published figures by the same model.

python -m tests.programs.gpu_estimate ENGINE [--device h200] [--batches 1,8,64] [--context 1024] [--prompt 2048]
python -m tests.programs.gpu_estimate --published

`ingot inspect` prints the same for the devices of an engine's target (`plugins/cuda/estimate.py`). The engine is only
read, so this needs no GPU.
"""

import argparse
from pathlib import Path

from ingot.engine import read_plan
from ingot.plugins.cuda.devices import DEVICES, Device
from ingot.plugins.cuda.estimate import BATCHES, CONTEXT, PROMPT, estimate

# Llama-3.1-8B in FP8 on one GPU, tokens per second of output: perf-overview.md in the docs of TensorRT-LLM 1.0
PUBLISHED = {  # (input, output) → h200, h100
    (128, 2048): (26221, 22714),
    (128, 4096): (18027, 14325),
    (500, 2000): (20770, 17660),
    (1000, 1000): (17744, 15220),
    (1000, 2000): (16828, 13899),
    (2048, 128): (3538, 3450),
    (2048, 2048): (12194, 9305),
    (5000, 500): (3902, 3459),
    (20000, 2000): (1804, 1351),
}
_WEIGHTS, _EMBEDDING, _KV_BYTES, _LAYERS, _HEADS_DIM = 7.5e9, 1.05e9, 65536, 32, 4096
_MOST_TOGETHER, _OF_MEMORY = 2048, 0.9  # requests; the share of memory that is used


def published_estimate(device: Device, given: int, new: int) -> float:
    """Tokens per second where as many requests run as fit: a step decodes all of them and computes its share of
    prompts. Weights and KV cache in FP8, lm_head in 16 bits."""
    room = (_OF_MEMORY * device.memory - _WEIGHTS - _EMBEDDING) / _KV_BYTES
    batch, seen = min(_MOST_TOGETHER, room / (given + new / 2)), given + new / 2
    rows = batch * (1 + given / new)
    products = device.seconds(_WEIGHTS, 2 * _WEIGHTS * rows, rate=device.rate_fp8)
    decode = device.seconds(batch * seen * _KV_BYTES, 4 * _LAYERS * _HEADS_DIM * batch * seen)
    prefill = device.seconds(0, 2 * _LAYERS * _HEADS_DIM * batch * given**2 / new)
    return batch / (products + decode + prefill)


def published_table() -> list[str]:
    """The estimate beside what was published."""
    text = ["| input | output | GPU | published | estimate | ratio |", "|---|---|---|---|---|---|"]
    for (given, new), figures in PUBLISHED.items():
        for device, figure in zip(("h200", "h100"), figures, strict=True):
            found = published_estimate(DEVICES[device], given, new)
            text.append(f"| {given:,} | {new:,} | {device} | {figure:,} | {found:,.0f} | {found / figure:.2f} |")
    return text


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--batches", default=BATCHES, type=_numbers)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--published", action="store_true")
    given = parser.parse_args()
    if given.published == (given.engine is not None):
        parser.error("expected an engine, or --published")
    if given.published:
        print("\n".join(published_table()))
        return
    device = DEVICES[given.device]
    print(f"{device.title} ({device.source}): an estimate, not executed on a GPU")
    print("\n".join(estimate(read_plan(given.engine), device, given.batches, given.context, given.prompt).table()))


if __name__ == "__main__":
    main()
