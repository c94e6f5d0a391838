"""Hostile configurations: each key of each model type is set to what it should not be, alone and with a second one.

    python -m tests.programs.hostile_configs [TYPE ...] [--pairs N] [--seed N] [--compare N]

A configuration is read, or refused in words; anything else is printed as a fault. Of those that are read and small,
--compare N are converted with random weights, and their logits compared with those of transformers, which may refuse
them.
"""

import argparse
import copy
import random
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingot.configs.read import Section
from ingot.convert.claim import require_rows
from ingot.convert.family import family_names, find_family, read_model
from ingot.convert.weight_shapes import weight_shapes
from ingot.errors import IngotError
from tests.convert.test_odd_configs import IDS, NOT_TRIED, OTHERS, base_of, keys_read, logits_of_graph, of_transformers

Config = dict[str, Any]
ABSENT = object()
HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 5, 7, 10**5, 2**31, 2**63, 10**30, -(10**30)),
    *(-1.0, 0.0, 0.5, 1.5, 1e-45, 1e38, 1e300, float("inf"), float("nan")),
    *(True, False, None, ABSENT, "", "strange", "full_attention"),
    *([], {}, [None], [[]], [1], [-1], [0.5], ["full_attention"], ["strange", "strange"], {"": 1}, {"rope_type": 3}),
)
MOST = 300_000  # numbers of the weights of a model that is compared
TOLERANCE = 1e-4  # of the range of the logits


def places(config: Config) -> Iterator[tuple[str, ...]]:
    """Keys that the family reads, those of objects inside too."""
    for key in sorted(keys_read(config) | set(config) - {"model_type"}):
        yield (key,)
        inner = config.get(key)
        if isinstance(inner, dict):
            for name, deep in inner.items():
                yield key, name
                yield from ((key, name, each) for each in deep) if isinstance(deep, dict) else ()


def changed(config: Config, place: tuple[str, ...], value: object) -> Config:
    made = copy.deepcopy(config)
    within = made
    for key in place[:-1]:
        within = within[key]
    if value is ABSENT:
        within.pop(place[-1], None)
    else:
        within[place[-1]] = copy.deepcopy(value)
    return made


def variants(name: str, pairs: int, draw: random.Random) -> Iterator[Config]:
    """Each place with each value, and so many random pairs of places."""
    config = dict(find_family(name).tiny)
    found = list(places(base_of(name))) + [place for place in places(config) if len(place) > 1]
    usual: dict[tuple[str, ...], Any] = {(key,): value for key, value in OTHERS.items() if (name, key) not in NOT_TRIED}
    for place in found:
        for value in HOSTILE:
            yield changed(config, place, value)
    for _ in range(pairs):
        made = config
        for place in draw.sample(found, 2):
            try:
                made = changed(made, place, draw.choice((*HOSTILE, usual.get(place, 1))))
            except (TypeError, KeyError):  # the second lies within the first
                continue
        yield made


def outcome(config: Config) -> int | None:
    """How many numbers the weights of the model have; None where it is refused. Raises what is no refusal."""
    try:
        family, model, _ = read_model(Section(config, "config.json"), None)
        shapes = weight_shapes(model)
        require_rows(family.table(model, ())[0], shapes)
    except IngotError:
        return None
    return sum(int(np.prod([float(size) for size in shape])) for shape in shapes.values())


def differs(config: Config, folder: Path) -> str:
    """What is wrong with the logits of a model that is read; "" where nothing is."""
    if read_model(Section(config, "config.json"), None)[1].max_positions < IDS.shape[1]:
        return ""  # the Graph holds the last position
    made = of_transformers(config)
    if made is None:
        return ""
    try:
        ours = logits_of_graph(made[0], config, folder)
    except IngotError:
        return ""  # in words, later
    if not (np.isfinite(made[1]).all() and np.ptp(made[1])):
        return ""
    if ours.shape != made[1].shape:
        return f"logits {ours.shape}, expected {made[1].shape}"
    error = np.abs(ours - made[1]).max() / np.ptp(made[1])
    return "" if error < TOLERANCE else f"logits are off by {error:.1e} of their range"


def difference(config: Config, name: str) -> Config:
    """What was changed, for people."""
    usual = find_family(name).tiny
    return {key: config.get(key, "absent") for key in {*config, *usual} if config.get(key) != usual.get(key)}


def try_type(name: str, *, pairs: int, compare: int, seed: int) -> list[str]:
    """Faults of a model type."""
    draw, faults, read, refused = random.Random(f"{name} {seed}"), [], [], 0
    for config in variants(name, pairs, draw):
        try:
            size = outcome(config)
        except Exception as error:  # the fault that is looked for
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            faults.append(f"{difference(config, name)}: {type(error).__name__} at {where}: {error}")
            continue
        refused += size is None
        if size is not None and size <= MOST:
            read.append(config)
    for config in draw.sample(read, min(compare, len(read))):
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong = differs(config, Path(folder))
            except Exception as error:  # likewise
                wrong = f"{type(error).__name__}: {error}"
        if wrong:
            faults.append(f"{difference(config, name)}: {wrong}")
    print(f"{name}: {refused} refused, {len(read)} read, {min(compare, len(read))} compared; {len(faults)} faults")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; default: all")
    parser.add_argument("--pairs", type=int, default=500, help="random pairs of changes for each type")
    parser.add_argument("--compare", type=int, default=10, help="models to compare with transformers for each type")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    options = parser.parse_args()
    failed = False
    for name in options.types or family_names():
        for fault in try_type(name, pairs=options.pairs, compare=options.compare, seed=options.seed):
            failed = True
            print(f"  {fault}"[:600])
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
