"""A graph → a TensorRT engine, in a process of its own, and what the builder said of it.

TensorRT-RTX's parser opens `libtensorrt_rtx.so` when it meets a plugin and ends its process if there is none; the wheel
has only `libtensorrt_rtx.so.1`. So the process gets a folder with a link of that name, found before any other. Whatever
ends it nevertheless is an error in words here.
"""

import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.errors import BuildError
from ingot.plan import Plan
from ingot.plugins.cuda.compiler import run_program
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.target import Progress
from ingot.plugins.tensorrt.handover import hand_over
from ingot.plugins.tensorrt.layers import Layer, check_layers, check_log, check_network, read_layers
from ingot.plugins.tensorrt.library import Library

_PROCESS = "ingot.plugins.tensorrt.compile_here"
_LINK, _LIBRARY = "libtensorrt_rtx.so", "libtensorrt_rtx.so.1"
_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")
_SAID = 6  # lines of the builder's warnings and errors that are repeated


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """network: kinds of layers that went in; layers: of the engine, in every profile; activation_bytes: of the GPU's
    memory, by profile; log: the builder's."""

    image: bytes
    network: Mapping[str, int]
    layers: tuple[Layer, ...]
    activation_bytes: tuple[int, ...]
    log: str


def compile_graph(
    graph: OpGraph,
    plan: Plan,
    library: Library,
    capabilities: Sequence[str],
    progress: Progress = lambda what, done, total: None,
) -> Compiled:
    """plan: what sessions give to the network; capabilities: "SM89" and the like; none: those that the library builds
    for by itself.

    Raises BuildError where the builder fails, or makes something else than the graph.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-") as temporary:
        folder = Path(temporary)
        hand_over(graph, plan, folder)
        links = folder / "lib"
        links.mkdir()
        (links / _LINK).symlink_to(library.folder / _LIBRARY)
        command = [sys.executable, "-m", _PROCESS, str(folder), library.module, ",".join(capabilities)]
        code, said = run_program(command, f"compiling the network with {library}", progress, _environment(links))
        log = (folder / "log.txt").read_text() if (folder / "log.txt").is_file() else ""
        if code != 0:
            raise failed(library, code, said, log)
        image = (folder / "rank0.plan").read_bytes()
        report = json.loads((folder / "report.json").read_text())
    compiled = Compiled(
        image=image,
        network=report["network"],
        layers=tuple(read_layers(log)),
        log=log,
        activation_bytes=tuple(int(each) for each in _ACTIVATIONS.findall(log)),
    )
    check_compiled(graph, compiled)
    return compiled


def check_compiled(graph: OpGraph, compiled: Compiled) -> None:
    """Hold network, engine and warnings against the graph. Raises BuildError."""
    check_log(compiled.log)
    check_network(graph, compiled.network)
    check_layers(graph, compiled.layers)


def _environment(links: Path) -> dict[str, str]:
    """That of this process, and the folder with the link first among those that libraries are looked for in."""
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(links) + (os.pathsep + before if before else ""),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def failed(library: Library, code: int, said: str, log: str) -> BuildError:
    """How a compiling process ended, what it printed last, and what the builder's log complains about."""
    errors = [line for line in log.splitlines() if line.startswith(("WARNING", "ERROR", "INTERNAL_ERROR"))]
    ended = [f"its process was ended by {signal.Signals(-code).name}"] if code < 0 else said.strip().splitlines()[-1:]
    return BuildError(
        f"{library.name} cannot compile the network",
        where=str(library),
        got="; ".join([*ended, *errors[:_SAID]]) or f"exit code {code}",
        hint="see `ingot doctor`; if the model builds for cuda targets, this is a bug of ingot or of the library",
    )
