"""The support table of the README, found by trying: `python -m tests.house.support` writes it.

Every family × precision × target is converted, built, and, where this machine can, run beside the target `ref`. With
PYTHONPATH=build/tiles/site, after `make tiles`, cpu/amx is tried too on a machine without tile registers.
"""

import enum
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import family_names, find_family
from ingot.errors import NoKernelError, UsageError
from ingot.plugins.registry import targets
from ingot.runtime.model_runner import ModelRunner
from tests.handmade import write_model
from tests.house.project import ROOT

BEGIN = "<!-- support: written by `python -m tests.house.support`, kept in step by a test -->"
END = "<!-- end of support -->"
# Of the range of the logits, against `ref`. w4g64 and w4g128 run the kernels of w4g32.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2, "w8": 1e-2, "w4g32": 2e-2}
# On tiles attention rounds to bf16, and int8 activations make steps of that.
TOLERANCE_ON_TILES = {**TOLERANCE, "w8": 2e-2}


# Family → one column for all architectures.
GPU_COLUMNS = {"cuda": "cuda/smXX", "tensorrt": "tensorrt/smXX", "tensorrt-rtx": "tensorrt-rtx"}


UNPROVEN = """Not proven, since we had no GPU:

- whether TensorRT-RTX takes a GPU of 9.0 (expected: it refuses), and that it loads and runs engines on any other
- every CUDA kernel's numbers on a real GPU, and that compute-sanitizer finds nothing
- tokens and layers of whole models, 729 sorts, under the real driver, cuBLASLt and graph capture
- every speed on GPUs: decode, prefill, paged attention, against the machine's limits and against transformers
- of the full TensorRT: that it builds, reads back and runs any of this
- several GPUs: an engine has one rank

`python -m tests.gpu_proof --work DIR` does the first four on an H100 or H200 ([docs/gpu.md](docs/gpu.md))."""


class Support(enum.Enum):
    """TESTED: runs and agrees with `ref`. TRAPPED: so does its machine code, with tile instructions done in software
    (tests/native/tile_trap.cpp). BUILDS: the machine that tried lacks what running it needs.
    UNPROVEN: planned, compiled and emulated by tests, never run on the real thing. REFUSED: with a reason.
    """

    TESTED = "tested"
    TRAPPED = "tested on emulated tiles"
    BUILDS = "builds"
    UNPROVEN = "not executed by us"
    REFUSED = "refused"


def columns() -> list[str]:
    """Targets, but one column for all architectures of GPUs."""
    return list(dict.fromkeys(_column(each.name) for each in targets()))


def _column(target: str) -> str:
    return GPU_COLUMNS.get(target.split("/")[0], target)


Row = tuple[str, str]  # family, precision


def find_support(family: str, work: Path) -> dict[Row, dict[str, Support]]:
    """What every target makes of a family in every precision, here and now. Raises what building or running raises.

    One engine holds all targets but those of GPUs: each has the plan and the weights that it has in one of its own.
    """
    found: dict[Row, dict[str, Support]] = {}
    on_gpu = list({_column(each.name): each.name for each in targets() if each.on_gpu}.values())
    others = [each for each in targets() if not each.on_gpu]
    model, checkpoint = write_model(work / family, dict(find_family(family).tiny)), work / f"{family}-checkpoint"
    convert(ConvertOptions(model_dir=model, output_dir=checkpoint))
    for precision in TOLERANCE:
        engine = work / f"{family}-{precision}"
        names = ",".join(target.name for target in others)
        build(BuildConfig(target=names, precision=precision, autotune=False), checkpoint, engine)
        expected = _logits(engine, "ref")
        row = found[family, precision] = {_column(each): _on_gpu(each, precision, checkpoint) for each in on_gpu}
        for target in others:
            row[target.name] = Support.BUILDS
            if target.missing() is None:
                error = np.abs(_logits(engine, target.name) - expected).max() / np.ptp(expected)
                bound = (TOLERANCE_ON_TILES if target.name == "cpu/amx" else TOLERANCE)[precision]
                assert error < bound, f"{family} {precision} {target.name}: off by {error:.1e}"
                trapped = target.name == "cpu/amx" and not _has_tiles()
                row[target.name] = Support.TRAPPED if trapped else Support.TESTED
    return found


def _has_tiles() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


def _on_gpu(target: str, precision: str, checkpoint: Path) -> Support:
    """Whether the plan can be made, the same for every GPU of a column; compiling it is for the target's own tests."""
    config = BuildConfig(target=target, precision=precision, activations="bf16", dry_run=True)  # nothing is measured
    try:
        build(config, checkpoint, checkpoint / "never")
    except (NoKernelError, UsageError):
        return Support.REFUSED
    return Support.UNPROVEN


def _logits(engine: Path, target: str) -> npt.NDArray[np.float32]:
    """Of every position of two prompts of different lengths."""
    prompts = [[1, 5, 9, 3, 7], [1, 7]]
    with ModelRunner.from_dir(engine, target=target) as runner:
        out = runner.generate(prompts, max_new_tokens=1, return_dict=True, output_context_logits=True)
    logits: npt.NDArray[np.float32] = np.concatenate(out["context_logits"])
    return logits


def table(found: dict[Row, dict[str, Support]]) -> str:
    """As Markdown."""
    names = columns()
    lines = ["| model type | precision | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for (family, precision), row in found.items():
        cells = " | ".join(row[name].value for name in names)
        lines.append(f"| `{family}` | `{precision}` | {cells} |")
    return "\n".join(lines)


def parse(text: str) -> dict[Row, dict[str, Support]]:
    """The table that stands in the README."""
    lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.strip().splitlines()]
    head, _, *rows = lines
    return {
        (row[0], row[1]): {name: Support(cell) for name, cell in zip(head[2:], row[2:], strict=True)} for row in rows
    }


def written() -> str:
    """The part of the README between the marks."""
    return (ROOT / "README.md").read_text().split(BEGIN)[1].split(END)[0].split("\n\n")[1]


def main() -> None:
    """Put the table of this machine into the README."""
    with tempfile.TemporaryDirectory() as work:
        found = {row: cells for family in family_names() for row, cells in find_support(family, Path(work)).items()}
    before, rest = (ROOT / "README.md").read_text().split(BEGIN)
    words = (
        "*tested*: runs and agrees with the numpy reference. *tested on emulated tiles*: so does the machine code, on\n"
        "a CPU with AVX-512 and BF16, its AMX instructions done in software; we had no CPU with AMX.\n"
        "*builds*: not run: our machine lacks the ISA.\n"
    )
    words += "*not executed by us*: built, and its kernels run on an emulated GPU by tests, but on no real one yet\n"
    words += (
        "(cuda and tensorrt: sm80, sm86, sm89, sm90, sm100, sm120; tensorrt-rtx, also /sm80, /sm86, /sm89, /sm120;\n"
    )
    words += "all of them also in `f16`). We have not built engines of tensorrt/smXX either: we had no such library.\n"
    words += f"*refused*: with a reason.\n\n{UNPROVEN}"
    body = f"{BEGIN}\n## Support\n\n{table(found)}\n\n{words}\n{END}"
    (ROOT / "README.md").write_text(before + body + rest.split(END)[1])


if __name__ == "__main__":
    main()
