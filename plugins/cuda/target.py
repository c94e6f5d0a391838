"""The targets cuda/sm80 to cuda/sm120: engines for NVIDIA GPUs, built on machines that have none."""

import contextlib
import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.dtypes import KV_CODES
from ingot.errors import REBUILD, EngineError, TargetError, UsageError
from ingot.plan import CacheGroup, Plan, Step
from ingot.plan_tiles import Tile
from ingot.plugins.cuda.bind import ACTIVATIONS, NARROW, OPS
from ingot.plugins.cuda.compiler import compile_kernels, find_compiler, why_not
from ingot.plugins.cuda.devices import devices_of
from ingot.plugins.cuda.experts import MAX_EXPERTS
from ingot.plugins.cuda.gpu import Device, Gpu, find_gpus, memory_beside
from ingot.plugins.cuda.nccl import find_nccl
from ingot.plugins.cuda.plan_facts import (
    CODE_LAYOUT,
    FP8_UNITS,
    LIBRARY,
    WIDE,
    WIDE_CODE,
    all_specialisations,
    code_weight,
    has_ranks,
    needs_library,
)
from ingot.plugins.cuda.products import find_library
from ingot.plugins.cuda.rank_session import CudaRankSession
from ingot.plugins.cuda.sampling import KERNELS as DRAW_KERNELS
from ingot.plugins.cuda.session import CudaSession, device_bytes
from ingot.plugins.cuda.shapes import MAX_GROUP, MAX_HEAD_DIM, MAX_LATENT_DIM, MAX_RANK, split_rules, takes_warpgroups
from ingot.plugins.cuda.states import MAX_KEY_DIM
from ingot.plugins.cuda.tilings import tiles_of_step
from ingot.plugins.cuda.wide_products import TYPES as WIDE_TYPES
from ingot.plugins.op import Op
from ingot.plugins.ops.round_slots_to_fp8 import OP as ROUND_SLOTS
from ingot.plugins.registry import find_op
from ingot.plugins.split_rules import SplitRules
from ingot.plugins.target import Constant, EnginePart, KernelLimits, Progress, RankLink, SessionOptions, Target
from ingot.weight_formats import FORMATS, TABLE_FORMAT

# Key heads are a dimension of the attention kernels' grid, which the driver limits; sizes are counted in int32.
LIMITS = KernelLimits(
    head_dim=MAX_HEAD_DIM,
    heads=65535,
    group=MAX_GROUP,
    extent=(1 << 31) - 1,
    experts=MAX_EXPERTS,
    latent_dim=MAX_LATENT_DIM,
    rank=MAX_RANK,
    key_dim=MAX_KEY_DIM,
    activations=frozenset(ACTIVATIONS),
)
_DTYPES = ("bf16", "f16", "f32")
_CODES = tuple(FORMATS)  # of quantised weights, whose products round their inputs to bf16
_TABLE_CODES = (TABLE_FORMAT.dtype,)
_FEWER_RANKS = "start fewer ranks on the machine, or build the engine with a smaller --tp_size and --pp_size"
_COPIES = 10  # of which the fastest counts
_RESERVE = 512 << 20  # bytes of GPU memory for libraries, graphs and fragmentation
_RESERVE_OF_RANKS = 1 << 30  # further ones, for the buffers of NCCL


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a target's machine code is for.

    code     as the compiler calls it: code for sm_90a runs on capability 9.0 alone, code for sm_80 on 8.0 and later 8.x
    highest  last minor number that runs it
    """

    code: str
    major: int
    minor: int
    highest: int

    def runs_on(self, gpu: Gpu) -> bool:
        major, minor = gpu.capability
        return major == self.major and self.minor <= minor <= self.highest


_ARCHITECTURES = {
    "sm120": Architecture(code="sm_120", major=12, minor=0, highest=9),
    "sm100": Architecture(code="sm_100", major=10, minor=0, highest=9),
    "sm90": Architecture(code="sm_90a", major=9, minor=0, highest=0),
    "sm89": Architecture(code="sm_89", major=8, minor=9, highest=9),
    "sm86": Architecture(code="sm_86", major=8, minor=6, highest=9),
    "sm80": Architecture(code="sm_80", major=8, minor=0, highest=9),
}
CODES = {f"cuda/{sm}": each.code for sm, each in _ARCHITECTURES.items()}  # target → its machine code


# The inputs of the first are rounded to FP8: the pass round_to_fp8 makes the other two of it.
_FP8_PRODUCTS, _FP8_ROUNDING = ("matmul.f8f8", "fp8_matmul.f8f8"), "round_to_fp8.f32"
# Likewise of experts: of what the second half reads, each slot is rounded by itself.
_FP8_EXPERTS, _FP8_SLOTS = [f"{op}.f8f8" for op in OPS if find_op(op).experts], f"{ROUND_SLOTS.name}.f32"
_WITH_FP8 = (*_FP8_PRODUCTS, _FP8_ROUNDING, *_FP8_EXPERTS, _FP8_SLOTS)
_OF_CODES = {op for op in OPS if find_op(op).attrs.get("activations") == "fp8"}
_OF_FP8 = {*_OF_CODES, *(kernel.split(".")[0] for kernel in (_FP8_ROUNDING, _FP8_SLOTS))}


def _dtypes(op: Op) -> tuple[str, ...]:
    """Types of weights or of the KV cache for which an op has kernels."""
    codes = _CODES if op.packed is not None and not op.stacked else _TABLE_CODES if op.tables else ()
    if op.uses_kv and not op.latent:
        codes = tuple(each.value for each in KV_CODES)
    return (*(_DTYPES if op.by_dtype else ("f32",)), *codes)


class CudaTarget:
    """One architecture. Activations are float32 in memory, 16-bit where products and attention take them."""

    packs_products = False
    adds_in_products = False
    frees_windows = True
    on_gpu = True
    captures_decode = True
    library = "cuBLASLt"

    def __init__(self, sm: str) -> None:
        self.name = f"cuda/{sm}"
        self.architecture = _ARCHITECTURES[sm]

    def kernels(self) -> tuple[str, ...]:
        """sm80 in a name: the instructions the kernel needs at least; each is compiled for the target's own SM."""
        own = tuple(f"{op}.{dtype}.sm80" for op in OPS if op not in _OF_FP8 for dtype in _dtypes(find_op(op)))
        many = self.many_row_kernels(gated=True).values()
        prompts = [f"paged_attention.{dtype}.{WIDE}" for dtype in ("bf16", "f16") if many]
        fp8 = [f"{name}.{self.fp8_units}" for name in _WITH_FP8 if self.fp8_units]
        return (*own, *many, *fp8, *prompts, *self.library_kernels().values(), *DRAW_KERNELS)

    @property
    def fp8_units(self) -> str:
        """In the names of kernels that multiply FP8: by warpgroups where there are some, else by warps, of sm_89 and
        newer. Empty for GPUs whose matrix units do not multiply FP8."""
        if (self.architecture.major, self.architecture.minor) < (8, 9):
            return ""
        return WIDE if self.architecture.code == WIDE_CODE else FP8_UNITS

    def many_row_kernels(self, *, gated: bool) -> dict[str, str]:
        """Products by warpgroups, which sm_90a alone has: of codes, of experts, of gated 16-bit numbers. cuBLASLt is
        faster without a gate, where no launch follows it."""
        if self.architecture.code != WIDE_CODE:
            return {}
        beside = [f"matmul.{each.value}" for each in WIDE_TYPES if gated or each.is_quantised]
        experts = [op for op in OPS if find_op(op).experts and op not in _OF_CODES]
        of_experts = [f"{op}.{each.value}" for op in experts for each in WIDE_TYPES]
        return {f"{name}.sm80": f"{name}.{WIDE}" for name in (*beside, *of_experts)}

    def library_kernels(self) -> dict[str, str]:
        """For float weights; cuBLASLt multiplies no codes."""
        own = [f"matmul.{dtype}.sm80" for dtype in _DTYPES]
        wide = [name for kernel, name in self.many_row_kernels(gated=True).items() if kernel in own]
        return {kernel: kernel + LIBRARY for kernel in (*own, *wide)}

    def split_rules(self) -> SplitRules:
        """For the largest GPU of the table that runs the machine code."""
        return split_rules(max(each.multiprocessors for each in devices_of(self.architecture.code)))

    def prompt_kernel(self, kernel: str, group: CacheGroup) -> str | None:
        """By warpgroups, which sm_90a alone has."""
        op, dtype, _ = kernel.split(".")
        has = not group.latent and takes_warpgroups(
            self.architecture.code, group.dtype, group.head_dim, group.tokens_per_block
        )
        return f"{op}.{dtype}.{WIDE}" if has else None

    def tiles(self, plan: Plan, step: Step) -> tuple[Tile, ...]:
        """Those of all architectures; the kernel's name says what one architecture alone has."""
        return tiles_of_step(plan, step)

    def limits(self) -> KernelLimits:
        """Kernels of all architectures take the same."""
        return LIMITS

    def activations(self, kernel: str) -> str:
        """The matrix units multiply what has one type; sums are float32. FP8 weights are bf16 to them but for inputs
        in FP8."""
        dtype = kernel.split(".")[1]
        return "fp8" if dtype == "f8f8" else "bf16" if dtype in _CODES else dtype

    def build_blocker(self) -> str | None:
        """What the machine that builds lacks."""
        return why_not(self.architecture.code)

    def extra_sections(self, plan: Plan, progress: Progress) -> tuple[Constant, ...]:
        """The machine code of the plan's kernels."""
        code, layout = self.architecture.code, CODE_LAYOUT + self.architecture.code
        first, *further = all_specialisations(plan)
        made = {"code": first, **{f"code.head_dim{each.head_dim}": each for each in further}}
        return tuple(
            Constant(name=name, layout=layout, data=compile_kernels(each, code, progress).image)
            for name, each in made.items()
        )

    def storing_narrow(self) -> frozenset[str]:
        """Those of all architectures are the same."""
        return NARROW

    def toolchain(self) -> dict[str, str]:
        """The compiler."""
        compiler = find_compiler()
        return {} if compiler is None else {"nvcc": compiler.version}

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        """Driver, GPU, or the library that computes matmuls of this engine, in words."""
        if isa is not None:
            raise UsageError("an ISA caps a CPU, not a GPU", where="--isa", got=isa, hint="leave --isa out")
        found = find_gpus()
        if found.why_not is not None:
            return found.why_not
        if self._gpu(found.gpus) is None:
            here = ", ".join(f"{gpu.name} (sm_{gpu.sm})" for gpu in found.gpus)
            return f"{self.name} needs a GPU that runs {self.architecture.code}; this machine has {here}"
        if part is not None and needs_library(part.plan()) and isinstance(missing := find_library(), str):
            disable = "or build the engine with --gemm_plugin disable"
            return f"{self.name} computes matmuls of this engine with {self.library}: {missing}, {disable}"
        if part is not None and has_ranks(part.plan()) and isinstance(absent := find_nccl(), str):
            return f"{self.name} exchanges data between the ranks of this engine with NCCL: {absent}"
        return None

    def kv_memory(self, plan: Plan) -> int | None:
        """Bytes that the GPU has free now for the KV cache beside everything else of the plan. Raises CapacityError
        where there is not even room for that."""
        gpu = self._require_gpu(plan)
        return memory_beside(gpu, device_bytes(plan) + _RESERVE)

    def rank_memory(self, plan: Plan, local: tuple[int, int]) -> int:
        """`kv_memory` of one rank's GPU. Raises as `kv_memory`, and TargetError where ranks have too few GPUs."""
        self._require_gpu(plan)
        return memory_beside(self._rank_gpu(local), device_bytes(plan) + _RESERVE + _RESERVE_OF_RANKS)

    def devices(self) -> int:
        """GPUs of this machine that run the machine code."""
        return sum(self.architecture.runs_on(gpu) for gpu in find_gpus().gpus)

    def read_bandwidth(self, nbytes: int) -> float:
        """Bytes per second of a copy within the GPU's memory."""
        return copy_bandwidth(self._require_gpu(), nbytes)

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> CudaSession:
        """Copies weights and machine code to the GPU. Raises TargetError, EngineError, CapacityError."""
        gpu = self._require_gpu(plan)
        self._check(plan, options)
        if has_ranks(plan):
            raise EngineError("the file is one of several ranks, and needs the others", where="the plan", hint=REBUILD)
        return CudaSession(plan, weights, options, gpu)

    def open_rank(
        self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, link: RankLink
    ) -> CudaRankSession:
        """Likewise, on the GPU of one rank, and waits for the other ranks. Raises RankError too."""
        self._require_gpu(plan)
        self._check(plan, options)
        gpu = self._rank_gpu(options.local)
        require_different_gpus(link.exchange(gpu.uuid))
        return CudaRankSession(plan, weights, options, gpu, link)

    def _check(self, plan: Plan, options: SessionOptions) -> None:
        if options.threads is not None:
            raise UsageError(
                "threads can be set for CPU targets only",
                where="threads",
                got=str(options.threads),
                hint="leave --threads out",
            )
        layout = code_weight(plan).layout
        if layout != CODE_LAYOUT + self.architecture.code:
            raise TargetError(
                "the machine code is for another GPU", expected=self.architecture.code, got=layout, hint=REBUILD
            )

    def _rank_gpu(self, local: tuple[int, int]) -> Gpu:
        """The ranks of a machine take its GPUs in order. A launcher may show each process one GPU alone."""
        gpus = [gpu for gpu in find_gpus().gpus if self.architecture.runs_on(gpu)]
        rank, ranks = local
        if len(gpus) not in (1, *range(ranks, len(gpus) + 1)) or not gpus:
            raise TargetError(
                "this machine has fewer GPUs than ranks of the engine",
                expected=f"{ranks} GPUs that run {self.name}",
                got=str(len(gpus)),
                hint=_FEWER_RANKS,
            )
        return gpus[rank if len(gpus) >= ranks else 0]

    def _require_gpu(self, plan: Plan | None = None) -> Gpu:
        part = None if plan is None else EnginePart(plan=lambda: plan)
        if (reason := self.run_blocker(part=part)) is not None:
            raise TargetError("this machine cannot run the engine", expected=self.name, got=reason)
        gpu = self._gpu(find_gpus().gpus)
        assert gpu is not None, "run_blocker() found one"
        return gpu

    def _gpu(self, gpus: tuple[Gpu, ...]) -> Gpu | None:
        return next((gpu for gpu in gpus if self.architecture.runs_on(gpu)), None)


def require_different_gpus(taken: Sequence[str]) -> None:
    """Raises TargetError where two ranks would compute on one GPU, which NCCL does not support. taken: by each rank"""
    for rank, place in enumerate(taken):
        if (other := taken.index(place)) != rank:
            raise TargetError(
                f"ranks {other} and {rank} have the same GPU",
                expected="a GPU for each rank",
                got=f"GPU {place} for both",
                hint=_FEWER_RANKS,
            )


def copy_bandwidth(gpu: Gpu, nbytes: int) -> float:
    """Bytes per second where the first half of a buffer is copied to the second: half of what is moved is read, half
    is written."""
    half = max(256, nbytes // 2)
    with contextlib.closing(Device(gpu)) as device:
        buffer = device.allocate(2 * half)
        times = []
        for _ in range(_COPIES):
            begin = time.perf_counter()
            device.copy(buffer + half, buffer, half)
            device.wait()
            times.append(time.perf_counter() - begin)
    return 2 * half / min(times)


TARGETS: tuple[Target, ...] = tuple(CudaTarget(sm) for sm in _ARCHITECTURES)
