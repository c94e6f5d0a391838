"""All families × precisions: whether ranks in processes give the bits of one rank.

python -m tests.programs.rank_bits [FAMILY ...] [--precision w8 ...] [--ranks 2] [--stages 2]

For each family a tiny model of random weights is built with `--sum_parts`, as one rank and divided, for the best CPU
target of this machine. With --stages, its layers are divided among as many pipeline stages of --ranks each. Logits of
prompts and of drawn tokens are compared bit for bit. It prints a line for each pair, with the reason where a build
refuses to divide the model, and exits with 1 where bits differ.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.convert.family import family_names, find_family
from ingot.errors import BuildError, IngotError
from ingot.runtime import ModelRunner
from tests.e2e.same_bits import random_checkpoint
from tests.e2e.test_quantised import bits
from tests.runtime.rank_processes import RankProcesses

PRECISIONS = {"f32": "auto", "bf16": "auto", "w8": "int8", "w4g32": "int8"}
# In which a model of any family can be divided among four ranks, where it has such a size at all.
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 128,
    "n_head": 4,
    "n_embd": 64,
}
MOST_LAYERS = 16
PROMPTS = [np.random.default_rng(length).integers(0, 50, length).tolist() for length in (1, 18)]


def shape_of(tiny: Mapping[str, Any]) -> dict[str, Any]:
    """A family's tiny model, with sizes that ranks can divide."""
    return {**tiny, **{name: size for name, size in SIZES.items() if isinstance(tiny.get(name), int)}}


def deeper(shape: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """With its layers repeated, so that every stage has one of each kind."""
    layers = next((name for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if name in shape), "")
    if stages == 1 or not layers or shape[layers] * stages > MOST_LAYERS:
        return dict(shape)
    lists = {name: list(each) * stages for name, each in shape.items() if _of_layers(each, shape[layers])}
    return {**shape, **lists, layers: shape[layers] * stages}


def _of_layers(value: Any, layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == layers


def compare(checkpoint: Path, folder: Path, precision: str, layout: tuple[int, int], processes: RankProcesses) -> str:
    """What is found: the same bits, others, or why the model is not divided. layout: ranks of a stage, stages."""
    ranks, stages = layout
    config = BuildConfig(
        target="cpu",
        precision=precision,
        activations=PRECISIONS[precision],
        sum_parts=ranks if ranks > 1 else None,
        tokens_per_block=16,
        autotune=False,
    )
    try:
        build(config, checkpoint, folder / "whole")
        build(dataclasses.replace(config, tp_size=ranks, pp_size=stages), checkpoint, folder / "divided")
    except BuildError as error:
        return f"refused: {error.what}; {error.got or error.where}"
    with ModelRunner.from_dir(folder / "whole") as runner:
        expected = bits(runner, PROMPTS)
    with processes.runner(folder / "divided", ranks * stages) as runner:
        found = bits(runner, PROMPTS)
    return "same bits" if found == expected else "OTHER BITS"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--precision", action="append", choices=PRECISIONS)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--stages", type=int, default=1)
    given = parser.parse_args()
    done: Counter[str] = Counter()
    processes = RankProcesses(given.ranks * given.stages - 1)
    for name in given.families or family_names():
        with tempfile.TemporaryDirectory() as folder:
            try:
                shape = deeper(shape_of(find_family(name).tiny), given.stages)
                checkpoint = random_checkpoint(Path(folder), shape)
            except (IngotError, ValueError):  # sizes that do not go together in this family
                checkpoint = random_checkpoint(Path(folder), find_family(name).tiny)
            for precision in given.precision or PRECISIONS:
                with tempfile.TemporaryDirectory(dir=folder) as engines:
                    said = compare(checkpoint, Path(engines), precision, (given.ranks, given.stages), processes)
                print(f"{name:22} {precision:6} {said}", flush=True)
                done[said.partition(":")[0]] += 1
    processes.close()
    print(", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    sys.exit(1 if "OTHER BITS" in done else 0)


if __name__ == "__main__":
    main()
