"""docs/support.md and its summary in the README, found by trying: `python -m tests.house.support` writes both.

Every family × precision × target is converted, built, and, where this machine can, run beside the target `ref`. With
PYTHONPATH=build/tiles-site, after `make tiles`, cpu/amx is tried too on a machine without tile registers. With names of
families only these are tried, and the rows of all others stay: `python -m tests.house.support qwen3 llama`.
"""

import argparse
import dataclasses
import enum
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import ISA_BASES
from ingot.convert.convert import convert
from ingot.convert.family import family_names, find_family
from ingot.convert.wrapped import WRAPPERS
from ingot.dtypes import DType
from ingot.errors import NoKernelError, UsageError
from ingot.plugins.cuda import compiler
from ingot.plugins.registry import find_target, targets
from ingot.plugins.target import Target
from ingot.runtime.model_runner import ModelRunner
from tests.handmade import write_model
from tests.house.project import ROOT
from tests.plugins.cuda.emulation import KEPT
from tests.plugins.cuda.kept_code import kept_on_disk

PAGE = ROOT / "docs/support.md"
BEGIN = "<!-- summary: written by `python -m tests.house.support`, kept in step by a test -->"
END = "<!-- end of summary -->"
# Of the range of the logits, against `ref`. w4g64 and w4g128 run the kernels of w4g32.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2, "w8": 1e-2, "w4g32": 2e-2}
# Where attention rounds to bf16, int8 activations make steps of that.
TOLERANCE_ROUNDED = {**TOLERANCE, "w8": 2e-2}
ROUNDED = ("cpu/avx512bf16", "cpu/amx")


# Family → one column for all architectures.
GPU_COLUMNS = {"cuda": "cuda/smXX", "tensorrt": "tensorrt/smXX", "tensorrt-rtx": "tensorrt-rtx"}
# The column of the page for all targets that run on CPUs: what a family is on one of them, it is in every precision.
ON_CPUS = "CPUs"
OTHERS = "all others"


HEAD = """# What works

Look up the `model_type` of your model's `config.json` in the [table of model types](#model-types), or in the table of
[models that take images, too](#text-models-of-models-for-images). ingot refuses any other model type by name.

| target | model types | precisions |
|---|---|---|
| CPUs | all | `f32`, `bf16`, `w8`, `w4g32`, `w4g64`, `w4g128` |
| `cuda/smXX` | all | the same, and `f16` |
| `tensorrt/smXX`, `tensorrt-rtx` | those that the table does not call refused | `f32`, `bf16`, `f16` |

**"Tested" means that the arithmetic of a model type is tested, not a published checkpoint.** The trained models that we
ran from the source to tokens are small: the shipped model, stories260K and gpt-nano-sort. We have not run a model of
8B. [What is not proven](#not-proven) lists more.

## Model types

`python -m tests.house.support` writes this table. For each model type it makes a small model with random weights,
builds the model in each precision for each target, and runs the engine if the machine can. Tests try every model type
again, on some of its targets.

| word in a cell | meaning |
|---|---|
| tested | the engine runs, and its logits agree with the numpy reference |
| tested on emulated tiles | tested on a CPU without AMX, where software computes the AMX instructions |
| builds | the engine was built, but not run, because our machine lacks the instructions |
| tested on an H200 | the engine for `cuda/sm90` runs on an H200 and agrees; no other GPU was tried |
| never run on a GPU | the engine was built, but not run on a GPU; tests run its kernels or network on an emulated GPU |
| never built | we had no copy of TensorRT; tests run the network that it would compile |
| refused | ingot refuses to build the engine, and says why |

A cell with one word holds for `f32`, `bf16`, `w8` and `w4g32`. Other cells name the precisions, and ingot refuses those
that the cell leaves out. A cell of the column of CPUs may name targets instead.

"""
WORDS = """
- The column of CPUs stands for `cpu/amx`, `cpu/avx512bf16`, `cpu/avx512`, `cpu/avxvnni`, `cpu/avx2`, and for `ref`, the
  reference in numpy. `cpu/amx` is tested on CPUs with AMX. If CI has no such CPU, software computes the AMX
  instructions.
- `cuda/smXX` and `tensorrt/smXX` stand for sm80, sm86, sm89, sm90, sm100 and sm120. `tensorrt-rtx` also has /sm80,
  /sm86, /sm89 and /sm120.
- `w4g64` and `w4g128` run the kernels of `w4g32`.
- Kernels of layers with states and of latent attention [passed their tests on an H200](gpu.md#what-was-tested-when).
- On `cuda`, 8 and 4 bits of models with experts, states, latents or residual streams need a Checkpoint in bf16
  (`ingot convert --dtype bf16`).
- [Adding a family](how-to/add.md#a-model-family) takes one file.

"""
WRAPPED = """## Text models of models for images

Some models take images and text. ingot converts only the text model of such a model. `ingot convert` leaves out the
parts for images, and says so.

"""
UNPROVEN = """## Not proven

CUDA engines ran on an H200 and an H100 ([NVIDIA GPUs](gpu.md#what-ran-on-a-real-gpu)). These questions are open:

- CUDA engines on other GPUs than H200 and H100
- published checkpoints on a GPU: the speeds come from random weights, the tokens from small trained models
- whether TensorRT-RTX accepts a GPU of compute capability 9.0 (we expect a refusal), and whether it loads and runs
  engines on other GPUs
- whether the full TensorRT builds, reads back and runs an engine

[Speculative decoding](how-to/speculation.md) with a trained draft model of another size never ran: in tests the model
is its own draft model.

One model on several GPUs: engines of several ranks ran on an emulated GPU alone. To repeat what ran on the H200, run
`python -m tests.gpu_proof --work DIR`.
"""


class Support(enum.Enum):
    """TESTED: runs and agrees with `ref`. TRAPPED: so does its machine code, with tile instructions done in software
    (tests/native/tile_trap.cpp). BUILDS: the machine that tried lacks what running it needs.
    TESTED_ON_GPU: as TESTED, on a GPU of one of the targets that share the column.
    UNPROVEN: planned, compiled and emulated by tests, never run on the real thing. UNBUILT: planned; no machine had the
    library that builds. REFUSED: with a reason.
    """

    TESTED = "tested"
    TRAPPED = "tested on emulated tiles"
    BUILDS = "builds"
    TESTED_ON_GPU = "tested on an H200"
    UNPROVEN = "never run on a GPU"
    UNBUILT = "never built"
    REFUSED = "refused"


def columns() -> list[str]:
    """Targets, but one column for all architectures of GPUs."""
    return list(dict.fromkeys(_column(each.name) for each in in_order()))


def _column(target: str) -> str:
    return GPU_COLUMNS.get(target.split("/")[0], target)


Row = tuple[str, str]  # family, precision


def find_support(family: str, work: Path, *, every: bool = True) -> dict[Row, dict[str, Support]]:
    """What targets make of a family in every precision, here and now. Raises what building or running raises.

    every: each target in each precision. Else each target in one precision, which moves on from family to family: so
    each family has every precision and every target, and each precision meets each target in some family.

    One engine holds all targets but those of GPUs: each has the plan and the weights that it has in one of its own.
    """
    first = family_names().index(family)
    found: dict[Row, dict[str, Support]] = {}
    on_gpu = gpu_targets()
    others = [each for each in in_order() if not each.on_gpu]
    model, checkpoint = write_model(work / family, dict(find_family(family).tiny)), work / f"{family}-checkpoint"
    convert(ConvertOptions(model_dir=model, output_dir=checkpoint))
    for number, precision in enumerate(TOLERANCE):
        count = len(on_gpu) + len(others)
        part = range(count) if every else range((number - first) % len(TOLERANCE), count, len(TOLERANCE))
        tried = [each for index, each in enumerate(others) if index in part]
        planned = [each for index, each in enumerate(on_gpu) if index in part]
        engine = work / f"{family}-{precision}"
        of_engine = ",".join(dict.fromkeys([*(target.name for target in tried), "ref"]))
        build(BuildConfig(target=of_engine, precision=precision, autotune=False), checkpoint, engine)
        expected = _logits(engine, "ref")
        row = found[family, precision] = {
            _column(each.name): _on_gpu(each, precision, model, checkpoint) for each in planned
        }
        for target in tried:
            row[target.name] = Support.BUILDS
            if target.run_blocker() is None:
                error = np.abs(_logits(engine, target.name) - expected).max() / np.ptp(expected)
                bound = (TOLERANCE_ROUNDED if target.name in ROUNDED else TOLERANCE)[precision]
                assert error < bound, f"{family} {precision} {target.name}: off by {error:.1e}"
                trapped = target.name == "cpu/amx" and not _has_tiles()
                row[target.name] = Support.TRAPPED if trapped else Support.TESTED
    return found


def _has_tiles() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


def in_order() -> list[Target]:
    """All targets, in one order on every machine: the order of `targets` is what the machine prefers."""
    levels = {f"cpu/{level}": place for place, level in enumerate(ISA_BASES)}
    return sorted(targets(), key=lambda each: levels.get(each.name, len(levels)))


def gpu_targets() -> list[Target]:
    """One of each column: that of this machine's GPU, if it has one."""
    found: dict[str, Target] = {}
    for each in in_order():
        if each.on_gpu and (_column(each.name) not in found or each.run_blocker() is None):
            found[_column(each.name)] = each
    return list(found.values())


def _on_gpu(target: Target, precision: str, model: Path, checkpoint: Path) -> Support:
    """Whether the plan can be made, the same for every GPU of a column, and runs if the machine has the GPU. Compiling
    for other GPUs is for the target's own tests."""
    config = BuildConfig(target=target.name, precision=precision, activations="bf16", dry_run=True)  # for codes
    if precision == "f32":
        config = dataclasses.replace(config, activations="auto")
    if precision.startswith("w"):  # GPUs multiply codes with bf16, so what has no codes must be bf16, too
        checkpoint = checkpoint.with_name(f"{checkpoint.name}-bf16")
        if not checkpoint.is_dir():
            convert(ConvertOptions(model_dir=model, output_dir=checkpoint, dtype=DType.BF16))
    try:
        build(config, checkpoint, checkpoint / "never")
    except (NoKernelError, UsageError):
        return Support.REFUSED
    if target.name.startswith("tensorrt/"):
        return Support.UNBUILT
    if target.run_blocker() is not None or target.name.startswith("tensorrt"):
        return Support.UNPROVEN
    engine = checkpoint.with_name(f"{checkpoint.name}-{precision}-gpu")
    build(dataclasses.replace(config, target=f"{target.name},ref", dry_run=False), checkpoint, engine)
    expected = _logits(engine, "ref")
    error = np.abs(_logits(engine, target.name) - expected).max() / np.ptp(expected)
    assert error < TOLERANCE_ROUNDED[precision], f"{checkpoint.name} {precision} {target.name}: off by {error:.1e}"
    return Support.TESTED_ON_GPU


def _logits(engine: Path, target: str) -> npt.NDArray[np.float32]:
    """Of every position of two prompts of different lengths, none of which is at a tie between two experts."""
    prompts = [[1, 6, 9, 3, 7], [1, 7]]
    threads = None if find_target(target).on_gpu else 1
    with ModelRunner.from_dir(engine, target=target, threads=threads) as runner:
        out = runner.generate(prompts, max_new_tokens=1, return_dict=True, output_context_logits=True)
    logits: npt.NDArray[np.float32] = np.concatenate(out["context_logits"])
    return logits


def table(found: dict[Row, dict[str, Support]]) -> str:
    """As Markdown: one row for each family."""
    names = [name for name in columns() if name not in on_cpus()]
    lines = ["| " + " | ".join(["model type", "models", ON_CPUS, *names]) + " |", "|---" * (len(names) + 3) + "|"]
    for family in dict.fromkeys(family for family, _ in found):
        rows = {precision: row for (each, precision), row in found.items() if each == family}
        own = {name: {row[name] for row in rows.values()} for name in on_cpus()}
        assert all(len(kinds) == 1 for kinds in own.values()), f"{family}: precisions differ on a CPU"
        cells = [_cpu_cell({name: kind for name, (kind,) in own.items()})]
        cells += [_family_cell({precision: row[name] for precision, row in rows.items()}) for name in names]
        lines.append(f"| `{family}` | {find_family(family).models} | {' | '.join(cells)} |")
    return "\n".join(lines)


def on_cpus() -> list[str]:
    """The targets that run on CPUs."""
    return [name for name in columns() if name not in GPU_COLUMNS.values()]


def _cpu_cell(cells: dict[str, Support]) -> str:
    """One word if all targets are alike; else the targets of each word, and the word of all others."""
    (most, count), *_ = Counter(cells.values()).most_common(1)
    others = (f"`{name}`: {kind.value}; " for name, kind in cells.items() if kind is not most)
    return most.value if count == len(cells) else f"{''.join(others)}{OTHERS}: {most.value}"


def _family_cell(cells: dict[str, Support]) -> str:
    """One word if all precisions are alike; else the precisions of each word, without those that are refused."""
    kinds = dict.fromkeys(cells.values())
    if len(kinds) == 1:
        return next(iter(kinds)).value
    named = {kind: ", ".join(f"`{each}`" for each, cell in cells.items() if cell is kind) for kind in kinds}
    return "; ".join(f"{names}: {kind.value}" for kind, names in named.items() if kind is not Support.REFUSED)


def summary(found: dict[Row, dict[str, Support]]) -> str:
    """Targets x precisions for the README, as Markdown: one row for each target, precisions alike in one column."""
    columns_of = {"f32, bf16": ("f32", "bf16"), "w8, w4g32, w4g64, w4g128": ("w8", "w4g32")}
    lines = [
        "| target | " + " | ".join(f"`{each.replace(', ', '`, `')}`" for each in columns_of) + " |",
        "|---|---|---|",
    ]
    for name in columns():
        cells = (_cell([row[name] for (_, each), row in found.items() if each in kept]) for kept in columns_of.values())
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(cells: Sequence[Support]) -> str:
    """What most families have, and whether some are refused."""
    found = Counter(cell for cell in cells if cell is not Support.REFUSED).most_common(1)
    word: str = found[0][0].value if found else Support.REFUSED.value
    return word + ("; some families refused" if found and Support.REFUSED in cells else "")


def parse(text: str) -> dict[Row, dict[str, Support]]:
    """The table that stands in docs/support.md."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    head, _, *rows = lines
    found: dict[Row, dict[str, Support]] = {}
    for family, _, cpus, *cells in rows:
        own = _parse_cell(cpus, on_cpus())
        parts = dict(zip(head[3:], (_parse_cell(cell, TOLERANCE) for cell in cells), strict=True))
        for precision in TOLERANCE:
            row = {**own, **{name: part.get(precision, Support.REFUSED) for name, part in parts.items()}}
            found[family.strip("`"), precision] = {name: row[name] for name in columns()}
    return found


def _parse_cell(cell: str, names: Iterable[str]) -> dict[str, Support]:
    """name → what stands for it; refused ones may be left out. names: all that the cell may name."""
    if "`" not in cell:
        return dict.fromkeys(names, Support(cell))
    kinds = (part.split(": ") for part in cell.split("; "))
    found = {name.strip("`"): Support(kind) for named, kind in kinds for name in named.split(", ")}
    return {**dict.fromkeys(names, found.pop(OTHERS)), **found} if OTHERS in found else found


def stands() -> str:
    """The table of docs/support.md."""
    return next(part for part in PAGE.read_text().split("\n\n") if part.startswith("| model type |"))


def wrapped() -> str:
    """The wrappers, as Markdown."""
    lines = [
        f"| `{name}` | {', '.join(f'`{each}`' for each in dict.fromkeys(wrapper.text.values()))} | {wrapper.models} |"
        for name, wrapper in WRAPPERS.items()
    ]
    return "\n".join([WRAPPED + "| model type | text model | models |", "|---|---|---|", *lines, "", ""])


def write(found: dict[Row, dict[str, Support]]) -> None:
    """The page, and the summary in the README."""
    PAGE.write_text(f"{HEAD}{table(found)}\n{WORDS}{wrapped()}{UNPROVEN}")
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{summary(found)}\n{END}{rest.split(END)[1]}")


def _keep_machine_code() -> None:
    """In a process that tries families: those with heads of one size share it."""
    mock.patch.object(compiler, "_compiled", kept_on_disk(KEPT / "cubins", compiler._compiled)).start()


def _find(family: str) -> dict[Row, dict[str, Support]]:
    with tempfile.TemporaryDirectory() as work:
        return find_support(family, Path(work))


def joined(tried: dict[Row, dict[str, Support]], stood: dict[Row, dict[str, Support]]) -> dict[Row, dict[str, Support]]:
    """What was tried, and of all other families what stood on the page, in the order of the families. What only another
    machine can run stays as that one found it."""
    rows = {**stood, **{row: _as_others_ran(cells, stood.get(row, {})) for row, cells in tried.items()}}
    return {(name, each): rows[name, each] for name in family_names() for each in TOLERANCE if (name, each) in rows}


def _as_others_ran(tried: dict[str, Support], stood: dict[str, Support]) -> dict[str, Support]:
    ran, untried = (Support.TESTED, Support.TRAPPED, Support.TESTED_ON_GPU), (Support.BUILDS, Support.UNPROVEN)
    kept = {name for name, cell in tried.items() if cell in untried and stood.get(name) in ran}
    return {name: stood[name] if name in kept else cell for name, cell in tried.items()}


def main() -> None:
    """Try all families, or those that are named, as many at a time as there are processors, and write what came out."""
    parser = argparse.ArgumentParser(description="write docs/support.md")
    parser.add_argument("families", nargs="*", choices=[[], *family_names()], metavar="FAMILY")
    families = parser.parse_args().families
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawned, initializer=_keep_machine_code) as pool:
        tried = {row: cells for found in pool.map(_find, families or family_names()) for row, cells in found.items()}
    write(joined(tried, parse(stands()) if families else {}))


if __name__ == "__main__":
    main()
