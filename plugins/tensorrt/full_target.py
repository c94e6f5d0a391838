"""The targets tensorrt/smXX: networks compiled by the full TensorRT, which users bring, on the GPU that runs them.

The engine is that of a tensorrt-rtx target: weights and the attention kernels' machine code in the rank file, beside it
the compiled network, untouched, and its description, which says by which version and on which GPU it was made.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, BuildError, EngineError, UsageError
from ingot.plan import Plan
from ingot.plugins.cuda.gpu import Gpu, find_gpus
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.target import File, Progress, SessionOptions, Target
from ingot.plugins.tensorrt.description import DESCRIPTION, NETWORK, describe
from ingot.plugins.tensorrt.full_compiler import compile_fully
from ingot.plugins.tensorrt.full_library import find_tensorrt
from ingot.plugins.tensorrt.library import Library
from ingot.plugins.tensorrt.session import Network, TensorRtSession
from ingot.plugins.tensorrt.target import Flavour, TensorRtRtxTarget, code_for, network_file
from ingot.plugins.tensorrt.tensors import require_lengths

_FLAVOURS = {
    "sm120": Flavour(capabilities=(), codes=("sm_120",), runs_on=((12, 0),)),
    "sm100": Flavour(capabilities=(), codes=("sm_100",), runs_on=((10, 0),)),
    "sm90": Flavour(capabilities=(), codes=("sm_90a",), runs_on=((9, 0),)),
    "sm89": Flavour(capabilities=(), codes=("sm_89",), runs_on=((8, 9),)),
    "sm86": Flavour(capabilities=(), codes=("sm_86",), runs_on=((8, 6),)),
    "sm80": Flavour(capabilities=(), codes=("sm_80",), runs_on=((8, 0),)),
}


class TensorRtTarget(TensorRtRtxTarget):
    """One compute capability: TensorRT chooses and times its tactics on the GPU where it builds."""

    def __init__(self, sm: str) -> None:
        self.name = f"tensorrt/{sm}"
        self.flavour = _FLAVOURS[sm]

    def library(self) -> Library | str:
        """As found, or what to install."""
        return find_tensorrt()

    def build_blocker(self) -> str | None:
        """The library, the compiler for the plugin's kernels, or the GPU itself."""
        if (reason := super().build_blocker()) is not None:
            return reason
        found = find_gpus()
        if found.why_not is not None:
            return f"{self.name} is built on the GPU that runs it: {found.why_not}"
        return (
            None if self._gpu(found.gpus) is not None else f"it is built on the GPU that runs it: {self.run_blocker()}"
        )

    def compile(self, graph: OpGraph, plan: Plan, progress: Progress) -> tuple[File, ...]:
        """The compiled network and its description."""
        return self.compile_timed(graph, plan, progress, cache=None, timed=True)

    def compile_timed(
        self, graph: OpGraph, plan: Plan, progress: Progress, *, cache: Path | None, timed: bool
    ) -> tuple[File, ...]:
        """The same with a file of times: the target's own, beside the one that the user has named."""
        require_lengths(graph, plan.limits)
        if (reason := self.build_blocker()) is not None:
            raise BuildError(
                f"this machine cannot build for {self.name}",
                got=reason,
                hint="`ingot doctor --all` says what is missing",
            )
        gpu, library = self._require()
        own = None if cache is None else cache.with_name(f"{cache.name}.{self.name.replace('/', '-')}")
        compiled = compile_fully(graph, plan, library, cache=own, timed=timed, progress=progress)
        words = {
            "target": self.name,
            "library": str(library),
            "version": library.version,
            "gpu": gpu.name,
            "capabilities": [".".join(map(str, gpu.capability))],
        }
        description = describe(graph, plan, words, compiled)
        return (File(suffix=NETWORK, data=compiled.image), File(suffix=DESCRIPTION, data=description))

    def toolchain(self) -> dict[str, str]:
        """Also the GPU and the driver, on which tactics depend."""
        found = find_gpus()
        gpu = self._gpu(found.gpus)
        return {**super().toolchain(), **({"GPU": gpu.name} if gpu else {}), "CUDA driver": found.driver or "none"}

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> TensorRtSession:
        """Copies weights and machine code to the GPU. Raises TargetError, EngineError, CapacityError."""
        if options.threads is not None:
            raise UsageError(
                "threads can be set for CPU targets only",
                where="threads",
                got=str(options.threads),
                hint="leave --threads out",
            )
        gpu, library = self._require(plan, options.directory)
        assert options.directory is not None, "the network lies in the engine's directory"
        file = network_file(options.directory, self.name)
        network = Network(image=file.read_bytes(), where=str(file), library=library)
        return TensorRtSession(plan, weights, options.num_blocks, gpu, network, code_for(plan, gpu))

    def built_by(self, directory: Path) -> str:
        """As the description of the network says."""
        file = network_file(directory, self.name)
        description = file.with_name(file.name + ".json")
        try:
            return str(json.loads(description.read_text())["version"])
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(
                "the network's description cannot be read", where=str(description), got=repr(error), hint=REBUILD
            ) from error

    def _gpu(self, gpus: Sequence[Gpu]) -> Gpu | None:
        return super()._gpu(tuple(gpus))


TARGETS: tuple[Target, ...] = tuple(TensorRtTarget(sm) for sm in _FLAVOURS)
