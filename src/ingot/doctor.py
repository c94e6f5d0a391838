"""What this machine offers, which targets can be built and run here, which engines run here, and why not."""

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from ingot.configs.sizes import format_bytes
from ingot.engine import check_files, read_manifest, read_plan
from ingot.errors import IngotError
from ingot.plugins.cpu.native import read_bandwidth
from ingot.plugins.cuda.compiler import MISSING as COMPILER_MISSING
from ingot.plugins.cuda.compiler import find_compiler
from ingot.plugins.cuda.gpu import find_gpus
from ingot.plugins.cuda.nccl import find_nccl
from ingot.plugins.cuda.products import find_library
from ingot.plugins.registry import fit_targets, targets
from ingot.plugins.tensorrt.full_library import find_tensorrt
from ingot.plugins.tensorrt.library import find_rtx
from ingot.runtime.answers.answer_formats import known_formats
from ingot.runtime.chat_template import ChatTemplates
from ingot.weights_memory import offers_huge_pages

BUFFER_BYTES = 256 << 20  # larger than any cache
LIBRARIES = ("numpy", "onnx", "onnx-graphsurgeon", "tokenizers", "click", "rich")
EXTRAS = ("torch", "transformers", "onnxruntime")  # used by tests and for .bin files only


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetState:
    """why_not: what stops this machine from building or running it, joined; None where nothing does."""

    name: str
    builds: bool
    runs: bool
    why_not: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """takes: the target of the engine that this machine would run; None where it runs none. why_not: a line for each
    target that it does not run. tool_parser, reasoning_parser: the formats that its chat template shows. problem: what
    stops anybody from reading the engine."""

    directory: str
    takes: str | None
    why_not: tuple[str, ...]
    problem: str | None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """
    huge_pages     whether weights can lie in 2 MiB pages, which are read faster
    bandwidth_gbs  what all cores together read, None if it could not be measured (then see bandwidth_why_not)
    libraries      name → version, None where it is not installed
    cuda           what GPU engines need here: compiler, driver and libraries, each as found or what to install
    """

    cpu: str
    isa: str
    isa_why: str
    cores: int
    memory_bytes: int
    available_bytes: int
    huge_pages: bool
    bandwidth_gbs: float | None
    bandwidth_why_not: str | None
    python: str
    libraries: dict[str, str | None]
    gpus: tuple[str, ...]
    cuda: dict[str, str]
    targets: tuple[TargetState, ...]
    engines: tuple[EngineState, ...]


def examine(engines: Sequence[Path] = ()) -> Machine:
    """Look at everything; takes about a second, most of it for the bandwidth. engines: directories to judge."""
    states = _targets()
    best = next((state.name for state in states if state.name.startswith("cpu/") and state.runs), "none")
    memory = _memory()
    bandwidth, why_not = _bandwidth()
    return Machine(
        cpu=_cpu_name(),
        isa=best.removeprefix("cpu/"),
        isa_why=choice_of_isa(best),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory["MemTotal"],
        available_bytes=memory["MemAvailable"],
        huge_pages=offers_huge_pages(),
        bandwidth_gbs=bandwidth,
        bandwidth_why_not=why_not,
        python=platform.python_version(),
        libraries={name: _version(name) for name in (*LIBRARIES, *EXTRAS)},
        gpus=_gpus(),
        cuda=_cuda(),
        targets=states,
        engines=tuple(_engine(path) for path in engines),
    )


def choice_of_isa(name: str) -> str:
    """Why `name` is the target for this machine and not a better one of its family."""
    family = [target for target in targets() if target.name.split("/")[0] == name.split("/")[0]]
    better = list(itertools.takewhile(lambda target: target.name != name, family))
    lacking = [target.name for target in better if target.run_blocker() is not None]
    if not better:
        return "the best level"
    if len(lacking) < len(better):
        return "chosen by name"
    return f"{' and '.join(lacking)}: not on this machine"


def _targets() -> tuple[TargetState, ...]:
    here = []
    for target in targets():
        reasons = (target.build_blocker(), target.run_blocker())
        why_not = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not None)) or None
        builds, runs = (reason is None for reason in reasons)
        here.append(TargetState(name=target.name, builds=builds, runs=runs, why_not=why_not))
    return tuple(here)


def _engine(path: Path) -> EngineState:
    """Reads the manifest and the sizes of the files alone: `ingot verify` checks their bytes."""
    try:
        manifest = read_manifest(path)
        check_files(path, manifest)
        wire, reasoning = known_formats(ChatTemplates.from_dir(path).texts.values())
        fit = fit_targets(manifest.targets, where=str(path), plan=lambda name: read_plan(path, target=name))
    except IngotError as error:
        problem = error.what + (f": {error.got}" if error.got else "")
        return EngineState(directory=str(path), takes=None, why_not=(), problem=problem)
    takes = fit.runs[0].name if fit.runs else None
    return EngineState(
        directory=str(path),
        takes=takes,
        why_not=tuple(fit.lines()),
        problem=None,
        tool_parser=wire,
        reasoning_parser=reasoning,
    )


def _bandwidth() -> tuple[float | None, str | None]:
    try:
        return read_bandwidth(BUFFER_BYTES) / 1e9, None
    except IngotError as error:
        return None, error.what


def _cuda() -> dict[str, str]:
    compiler, found, library = find_compiler(), find_gpus(), find_library()
    return {
        "compiler": COMPILER_MISSING if compiler is None else f"nvcc {compiler.version}, {compiler.origin}",
        "driver": found.why_not or f"driver {_driver_version()}, which supports CUDA {found.driver}",
        "products": "cuBLASLt is here"
        if not isinstance(library, str)
        else f"only engines of --gemm_plugin disable run without it; {library}",
        "exchange between ranks": str(nccl)
        if not isinstance(nccl := find_nccl(), str)
        else f"only engines of one rank run on a GPU without it; {nccl}",
        "networks": str(find_rtx()),
        "networks on the GPU": str(find_tensorrt()),
    }


def _driver_version() -> str:
    """Version of the kernel module, e.g. "580.95.05"."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module.*?(\d+(?:\.\d+)+)", path.read_text()) if path.is_file() else None
    return found[1] if found else "of unknown version"


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[str, ...]:
    """As the driver shows them; where cuda-python cannot ask it, as the system does."""
    if shown := find_gpus().gpus:
        return tuple(f"{gpu.name} (sm_{gpu.sm}, {format_bytes(gpu.memory_bytes)})" for gpu in shown)
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        found.append(fields.get("Model", path.parent.name).strip())
    return tuple(found)
