"""A graph → an engine of the full TensorRT, on the GPU that will run it, in a process of its own.

Times of tactics go to a file of the user's, if there is one: the next build with it is faster, with the same tactics.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ingot.errors import UsageError
from ingot.plan import Plan
from ingot.plugins.cuda.compiler import run_program
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.target import Progress
from ingot.plugins.tensorrt.compiler import Compiled, check_compiled, failed
from ingot.plugins.tensorrt.handover import hand_over
from ingot.plugins.tensorrt.layers import inspected_layers
from ingot.plugins.tensorrt.library import Library

_PROCESS = "ingot.plugins.tensorrt.compile_on_gpu"


def compile_fully(
    graph: OpGraph, plan: Plan, library: Library, *, cache: Path | None, timed: bool, progress: Progress
) -> Compiled:
    """plan: what sessions give to the network; cache: of times, read and then written; timed: False takes the first
    tactic that works.

    Raises BuildError where the builder fails, or makes something else than the graph (the library reads the engine back
    and lists its layers); UsageError for a cache that cannot be read or written.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-") as temporary:
        folder = Path(temporary)
        hand_over(graph, plan, folder)
        (folder / "options.json").write_text(json.dumps({"timed": timed}))
        if cache is not None and timed and cache.exists():
            _copy(cache, folder / "timing.cache", cache)
        command = [sys.executable, "-m", _PROCESS, str(folder), library.module]
        path = os.pathsep.join(path for path in sys.path if path)
        code, said = run_program(
            command, f"compiling the network with {library}", progress, {**os.environ, "PYTHONPATH": path}
        )
        log = (folder / "log.txt").read_text() if (folder / "log.txt").is_file() else ""
        if code != 0:
            raise failed(library, code, said, log)
        report = json.loads((folder / "report.json").read_text())
        compiled = Compiled(
            image=(folder / "rank0.plan").read_bytes(),
            network=report["network"],
            log=log,
            layers=tuple(inspected_layers((folder / "layers.json").read_text())),
            activation_bytes=tuple(report["activation_bytes"]),
        )
        check_compiled(graph, compiled)
        if cache is not None and timed:
            fresh = cache.with_name(f".{cache.name}.partial")
            try:
                _copy(folder / "timing.cache", fresh, cache)
                fresh.replace(cache)
            finally:
                fresh.unlink(missing_ok=True)
        return compiled


def _copy(source: Path, to: Path, cache: Path) -> None:
    try:
        shutil.copyfile(source, to)
    except OSError as error:
        raise UsageError(
            "the timing cache cannot be read or written",
            where=str(cache),
            got=error.strerror,
            hint="choose another file",
        ) from error
