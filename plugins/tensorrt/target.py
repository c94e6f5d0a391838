"""The targets tensorrt-rtx and tensorrt-rtx/smXX: networks compiled by TensorRT-RTX on machines without a GPU.

The engine holds three things: weights and machine code of the attention kernels in the rank file, as for a cuda target,
and beside it the compiled network, untouched, with a description.
"""

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.errors import REBUILD, BuildError, EngineError, TargetError, UsageError
from ingot.plan import Plan, Weight
from ingot.plugins.cuda.bind import OPS, OPS_ALONE
from ingot.plugins.cuda.compiler import compile_kernels, find_compiler, why_not
from ingot.plugins.cuda.devices import DEVICES
from ingot.plugins.cuda.draw_rows import DrawLayout
from ingot.plugins.cuda.gpu import Gpu, find_gpus, memory_beside
from ingot.plugins.cuda.plan_facts import CODE_LAYOUT, specialisation
from ingot.plugins.cuda.sampling import KERNELS as DRAW_KERNELS
from ingot.plugins.cuda.shapes import split_rules
from ingot.plugins.cuda.target import LIMITS, copy_bandwidth
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.registry import find_op
from ingot.plugins.split_rules import SplitRules
from ingot.plugins.target import Constant, EnginePart, File, KernelLimits, Progress, SessionOptions, Target, file_name
from ingot.plugins.tensorrt.compiler import compile_graph
from ingot.plugins.tensorrt.description import DESCRIPTION, NETWORK, describe
from ingot.plugins.tensorrt.library import Library, find_rtx
from ingot.plugins.tensorrt.plan_file import HEADER_BYTES, read_header
from ingot.plugins.tensorrt.session import Network, TensorRtSession
from ingot.plugins.tensorrt.tensors import most_blocks, require_lengths

_DTYPES = ("bf16", "f16", "f32")
_RESERVE = 1 << 30  # bytes of GPU memory for contexts, libraries, what is compiled on the GPU, and fragmentation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flavour:
    """For which GPUs a network and its kernels are compiled.

    capabilities  in the library's words; none: those that it takes by itself, 8.0, 8.6, 8.9, 12.0 and newer
    codes         machine code of the attention kernels; code for sm_80 runs on every 8.x from 8.0 on
    runs_on       capabilities of GPUs, major and minor number
    """

    capabilities: tuple[str, ...]
    codes: tuple[str, ...]
    runs_on: tuple[tuple[int, int], ...]


_FLAVOURS = {
    "": Flavour(capabilities=(), codes=("sm_80", "sm_120"), runs_on=((8, 0), (8, 6), (8, 9), (12, 0), (12, 1))),
    "/sm120": Flavour(capabilities=("SM120",), codes=("sm_120",), runs_on=((12, 0),)),
    "/sm89": Flavour(capabilities=("SM89",), codes=("sm_89",), runs_on=((8, 9),)),
    "/sm86": Flavour(capabilities=("SM86",), codes=("sm_86",), runs_on=((8, 6),)),
    "/sm80": Flavour(capabilities=("SM80",), codes=("sm_80",), runs_on=((8, 0),)),
}


class TensorRtRtxTarget:
    """One flavour. Activations are float32 or, where products take them, 16-bit, as TensorRT fuses its layers."""

    packs_products = False
    adds_in_products = False
    frees_windows = False
    on_gpu = True
    captures_decode = True

    def __init__(self, word: str) -> None:
        self.name = f"tensorrt-rtx{word}"
        self.flavour = _FLAVOURS[word]

    def kernels(self) -> tuple[str, ...]:
        """tensorrt in a name: native layers; sm80: kernels of cuda targets, in the attention plugin or behind it."""
        own = tuple(
            f"{op}.{dtype}.{'sm80' if find_op(op).uses_kv else 'tensorrt'}"
            for op in OPS
            if op not in OPS_ALONE
            for dtype in (_DTYPES if find_op(op).by_dtype else ("f32",))
        )
        return (*own, *DRAW_KERNELS)

    def limits(self) -> KernelLimits:
        """Those of the attention kernels, as far as the plugin gives them what they take."""
        return dataclasses.replace(
            LIMITS, head_dim=256, one_group=True, sinks=False, slopes=False, growth=False, made_values=False
        )

    def activations(self, kernel: str) -> str:
        """Products are strongly typed: both factors have the weight's type."""
        return kernel.split(".")[1]

    def split_rules(self) -> SplitRules:
        """For the largest GPU of the table that runs the network."""
        return split_rules(
            max(each.multiprocessors for each in DEVICES.values() if each.capability in self.flavour.runs_on)
        )

    def library(self) -> Library | str:
        """As found, or what to install."""
        return find_rtx()

    def devices(self) -> int:
        """GPUs of this machine that run the network."""
        return sum(gpu.capability in self.flavour.runs_on for gpu in find_gpus().gpus)

    def build_blocker(self) -> str | None:
        """The library, or the compiler for the plugin's kernels."""
        library = self.library()
        if isinstance(library, str):
            return library
        return next((reason for code in self.flavour.codes if (reason := why_not(code)) is not None), None)

    def extra_sections(self, plan: Plan, progress: Progress) -> tuple[Constant, ...]:
        """The machine code of the attention kernels."""
        made = {code: compile_kernels(specialisation(plan), code, progress) for code in self.flavour.codes}
        return tuple(
            Constant(
                name="code" if code == self.flavour.codes[0] else f"code.{code}",
                layout=CODE_LAYOUT + code,
                data=each.image,
            )
            for code, each in made.items()
        )

    def compile(self, graph: OpGraph, plan: Plan, progress: Progress) -> tuple[File, ...]:
        """The compiled network and its description."""
        require_lengths(graph, plan.limits)
        library = find_rtx()
        if isinstance(library, str):
            raise BuildError(
                f"this machine cannot build for {self.name}",
                got=library,
                hint="`ingot doctor --all` says what is missing",
            )
        compiled = compile_graph(graph, plan, library, self.flavour.capabilities, progress)
        header = read_header(compiled.image, NETWORK)
        words = {"target": self.name, "library": str(library), "capabilities": list(header.capabilities)}
        return (
            File(suffix=NETWORK, data=compiled.image),
            File(suffix=DESCRIPTION, data=describe(graph, plan, words, compiled)),
        )

    def toolchain(self) -> dict[str, str]:
        """The compilers of networks and kernels."""
        library, compiler = self.library(), find_compiler()
        return {
            **({} if isinstance(library, str) else {library.name: library.version}),
            **({} if compiler is None else {"nvcc": compiler.version}),
        }

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        """Driver, GPU, library, or its version that built this engine, in words."""
        if isa is not None:
            raise UsageError("an ISA caps a CPU, not a GPU", where="--isa", got=isa, hint="leave --isa out")
        found = find_gpus()
        if found.why_not is not None:
            return found.why_not
        if self._gpu(found.gpus) is None:
            here = ", ".join(f"{gpu.name} (sm_{gpu.sm})" for gpu in found.gpus)
            wanted = ", ".join(f"{major}.{minor}" for major, minor in self.flavour.runs_on)
            return f"{self.name} needs a GPU of compute capability {wanted}; this machine has {here}"
        library = self.library()
        if isinstance(library, str):
            return library
        if part is None or part.directory is None or (built := self.built_by(part.directory)) == library.version:
            return None
        return f"{self.name} needs {library.name} {built}, which built this engine; this machine has {library}"

    def built_by(self, directory: Path) -> str:
        """The version of the library that compiled the network of an engine. Raises EngineError."""
        file = network_file(directory, self.name)
        try:
            with file.open("rb") as opened:
                return read_header(opened.read(HEADER_BYTES), str(file)).version
        except OSError as error:
            raise EngineError(
                "the network of the engine cannot be read", where=str(file), got=str(error), hint=REBUILD
            ) from error

    def kv_memory(self, plan: Plan) -> int | None:
        """Bytes that the GPU has free now for the KV cache, at most what TensorRT's tensors may hold; the library's own
        memory is taken to be no more than the plan's activations and a reserve. Raises CapacityError where there is not
        even room for that."""
        gpu, _ = self._require()
        drawn = 4 * plan.limits.max_logit_rows * plan.vocab_size + DrawLayout.of(plan).nbytes
        free = memory_beside(gpu, plan.weight_bytes + plan.arena_bytes + drawn + plan.block_bytes + _RESERVE)
        return min(free, (most_blocks(plan) - 1) * plan.block_bytes)

    def read_bandwidth(self, nbytes: int) -> float:
        """Bytes per second of a copy within the GPU's memory."""
        return copy_bandwidth(self._require()[0], nbytes)

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> TensorRtSession:
        """Copies weights and machine code to the GPU; the library finishes the network there.

        Raises TargetError, EngineError, CapacityError.
        """
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

    def _require(self, plan: Plan | None = None, directory: Path | None = None) -> tuple[Gpu, Library]:
        part = None if plan is None else EnginePart(plan=lambda: plan, directory=directory)
        if (reason := self.run_blocker(part=part)) is not None:
            raise TargetError(
                "this machine cannot run the engine",
                where=None if directory is None else str(directory),
                expected=self.name,
                got=reason,
                hint=None if plan is None else "install what is missing, or build the engine again",
            )
        gpu, library = self._gpu(find_gpus().gpus), self.library()
        assert gpu is not None, "run_blocker() found none"
        assert not isinstance(library, str), "run_blocker() found it"
        return gpu, library

    def _gpu(self, gpus: tuple[Gpu, ...]) -> Gpu | None:
        return next((gpu for gpu in gpus if gpu.capability in self.flavour.runs_on), None)


def network_file(directory: Path, target: str) -> Path:
    """Where the network of a target of an engine lies."""
    own = directory / file_name(NETWORK, target)
    return own if own.is_file() else directory / file_name(NETWORK)


def code_for(plan: Plan, gpu: Gpu) -> Weight:
    """The machine code that a GPU runs: of its major number, and of no later minor one."""
    major, minor = gpu.capability
    for weight in plan.weights:
        number = weight.layout.removeprefix(f"{CODE_LAYOUT}sm_").rstrip("a")
        if number.isdigit() and divmod(int(number), 10)[0] == major and divmod(int(number), 10)[1] <= minor:
            return weight
    held = [weight.layout.removeprefix(CODE_LAYOUT) for weight in plan.weights if weight.layout.startswith(CODE_LAYOUT)]
    raise EngineError(
        "the engine holds no machine code for this GPU",
        expected=f"a GPU for {', '.join(held) or 'no code at all'}",
        got=f"sm_{gpu.sm}",
        hint="build the engine for a target of this GPU: `ingot doctor --all` lists the targets",
    )


TARGETS: tuple[Target, ...] = tuple(TensorRtRtxTarget(word) for word in _FLAVOURS)
