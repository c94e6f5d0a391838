"""The targets cpu/avx2, cpu/avxvnni, cpu/avx512, cpu/avx512bf16 and cpu/amx: Plan → native Session."""

import functools

import numpy as np
import numpy.typing as npt

from ingot.configs.runtime import ISA_BASES, ISA_LEVELS, isa_includes
from ingot.dtypes import DType
from ingot.errors import TargetError, UsageError
from ingot.plan import Plan
from ingot.plugins.cpu.machine import processor_name
from ingot.plugins.cpu.native import (
    ROUNDING_LEVELS,
    _cpu,
    core_count,
    detect_isa,
    enough_threads,
    num_threads,
    offered_isas,
    preferred_isas,
    require_native,
    why_not,
)
from ingot.plugins.cpu.numa import numa_placement
from ingot.plugins.cpu.rank_blocks import RankBlocks
from ingot.plugins.cpu.ranks import open_group
from ingot.plugins.cpu.session import CpuRankSession, CpuSession, open_native
from ingot.plugins.target import (
    CallRules,
    Constant,
    EnginePart,
    KernelLimits,
    Product,
    Progress,
    RankLink,
    SessionOptions,
    Target,
)
from ingot.weight_formats import W4, W8
from ingot.weights_memory import NumaPlacement, offers_huge_pages

# Of all levels, as ops check them when a plan is opened. Sizes stay below 2^31, so that their products fit int64.
_LIMITS = KernelLimits(layers=65535, extent=(1 << 31) - 1, experts=65535, taken_experts=(1 << 31) - 1)
_TUNING_VERSION = 8  # of the matrix products: advances when their speed or their tactics change
_TIMING_SECONDS = 0.002  # of one product in one way
_STREAMED_ROWS = 32  # on tiles: all sums stay there, which leaves no choice
_TILE_TACTICS = ("parts of K", "epilogue apart", "half parts")


class CpuTarget:
    """One instruction set level. The compiled module holds the kernels of all levels, or, where `make quickstart` has
    compiled it, of the levels that this machine prefers."""

    packs_products = True
    adds_in_products = True
    frees_windows = True
    on_gpu = False

    def __init__(self, level: str) -> None:
        self.name = f"cpu/{level}"
        self._level = level

    def kernels(self) -> tuple[str, ...]:
        """Kernels of this level, then of the levels that it includes."""
        if why_not is not None:
            return ()
        return _kernels_of(self._level, tuple(_cpu.kernel_names()))

    def limits(self) -> KernelLimits:
        """Kernels of all levels take the same."""
        return _LIMITS

    def activations(self, kernel: str) -> str:
        """AMX tiles and the dot product of bf16 take both factors in bf16, AMX also where weights are quantised. Beside
        the dot product, the scales of quantised weights multiply sums: the weights stay what they are, which bf16 holds
        where they are w8 or w4."""
        _, dtype, isa = kernel.split(".")
        if dtype.endswith("a8"):
            return "int8"
        if isa.startswith("avx512bf16") and DType(dtype).weight_format not in (None, W8, W4):
            return "bf16_inputs"
        return "bf16" if isa.startswith(ROUNDING_LEVELS) else "f32"

    def call_rules(self) -> CallRules:
        """Rules of all levels, as the compiled module gives them."""
        require_native()
        norming, by_rows, private_elements = _cpu.call_rules()
        return CallRules(norming=frozenset(norming), by_rows=frozenset(by_rows), private_elements=private_elements)

    def build_blocker(self) -> str | None:
        """Packing needs numpy alone, but only the compiled module knows its kernels."""
        if why_not is not None:
            return f"ingot's compiled CPU module is not here: {why_not}"
        if any(name.endswith(f".{self._level}") for name in _cpu.kernel_names()):
            return None
        return (
            f"this ingot has no kernels for {self.name}: make quickstart has compiled it for one machine alone; "
            "install the wheel of `make wheel`, which has all"
        )

    def extra_sections(self, plan: Plan, progress: Progress) -> tuple[Constant, ...]:
        """The kernels lie in the compiled module, not in the engine."""
        return ()

    def toolchain(self) -> dict[str, str]:
        """Nothing but ingot itself."""
        return {}

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        """Why not, which all engines of the target share. Raises UsageError for an `isa` that is not a level."""
        if isa is not None and isa not in ISA_BASES:
            raise UsageError(f"there is no ISA {isa!r}", where="--isa", expected=", ".join(ISA_LEVELS))
        if why_not is not None:
            return self.build_blocker()
        here = offered_isas()
        usable = here if isa is None else tuple(level for level in here if level in isa_includes(isa))
        if self._level in usable:
            return self.build_blocker()
        cap = f", capped to {isa} by --isa" if usable != here else ""
        offers = " and ".join(_leaves(here)) or "none"
        return f"{self.name} needs {self._level.upper()}; this machine offers {offers}{cap}"

    def kv_memory(self, plan: Plan) -> int | None:
        """The host's."""
        return None

    def rank_memory(self, plan: Plan, local: tuple[int, int]) -> int | None:
        """The host's."""
        return None

    def machine(self) -> str:
        """Processor, cores and version of the products."""
        return f"{processor_name()}, {core_count()} cores, {detect_isa()}, products {_TUNING_VERSION}"

    def tactics(self, product: Product, rows: int) -> tuple[str, ...]:
        """How threads share the work; of many rows on tiles (AMX) also how they go over K."""
        if product.experts:
            names = ("own panels", "blocks in turn") if rows == 1 else ("as shipped", "otherwise shared")
            return (*names, "whole experts in turn") if product.kernel.startswith("moe_gate_up.") else names
        if rows == 1:
            return "panel by panel", "blocks"
        on_tiles = rows > _STREAMED_ROWS and product.kernel.split(".")[2].startswith("amx")
        return ("as shipped", "other blocks", *(_TILE_TACTICS if on_tiles else ()))

    @enough_threads()
    def time_product(self, product: Product, rows: int, tactic: int) -> float:
        """Seconds on all cores; the fastest of several calls."""
        if product.experts:
            return _cpu.time_experts(
                product.kernel,
                rows,
                product.experts,
                product.slots,
                product.n,
                product.k,
                product.group,
                product.gated,
                product.panel_bytes,
                tactic,
                core_count(),
                _TIMING_SECONDS,
            )
        return _cpu.time_matmul(
            product.kernel,
            rows,
            product.n,
            product.k,
            product.group,
            product.gated,
            product.panel_bytes,
            tactic,
            core_count(),
            _TIMING_SECONDS,
        )

    def placement(self, plan: Plan, threads: int | None) -> NumaPlacement | None:
        """2 MiB pages near the cores that read them; None where the system has none and one memory node holds all."""
        require_native()
        found = numa_placement(plan, _cpu.cores(), num_threads(threads))
        return found if offers_huge_pages() or len(found.cores) > 1 else None

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> CpuSession:
        """Bind `plan` to this machine. Raises EngineError for a plan that is wrong, TargetError, CapacityError."""
        self._require_machine()
        return open_native(plan, weights, options, self._level)

    def open_rank(
        self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions, link: RankLink
    ) -> CpuRankSession:
        """The same for one rank of several processes."""
        self._require_machine()
        stages = plan.stage[1]
        blocks = RankBlocks(link.exchange(plan.caches), stages)
        group = open_group(plan, link, options)
        return CpuRankSession(open_native(plan, weights, options, self._level, group), group, link, stages, blocks)

    def _require_machine(self) -> None:
        require_native()
        if (reason := self.run_blocker()) is not None:
            raise TargetError(
                "this machine cannot run the engine",
                expected=self.name,
                got=reason,
                hint="rebuild it for this machine: ingot build --target cpu",
            )


@functools.cache
def _kernels_of(level: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `names` that this level runs, its own first."""
    return tuple(name for each in isa_includes(level) for name in names if name.endswith(f".{each}"))


def _leaves(levels: tuple[str, ...]) -> list[str]:
    """Without the levels that others of them include."""
    return [level for level in levels if not any(ISA_BASES[each] == level for each in levels)]


TARGETS: tuple[Target, ...] = tuple(CpuTarget(level) for level in preferred_isas())
