"""The target `ref`: interprets any plan in numpy with the ops' references. Needs no native part."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.dtypes import KV_CODES
from ingot.plan import Plan
from ingot.plugins.op import Op
from ingot.plugins.ref.ranks import RanksSession
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_op, op_names
from ingot.plugins.target import Constant, EnginePart, KernelLimits, Progress, SessionOptions, Target
from ingot.step_io import Session
from ingot.weight_formats import FORMATS, TABLE_FORMAT

_PRODUCTS = (*("f32", "bf16", *FORMATS, "f8f8"), *(f"{name}a8" for name, each in FORMATS.items() if each.rounds_inputs))
_TABLES = ("f32", "bf16", TABLE_FORMAT.dtype)
_CACHES = ("f32", "bf16", *(each.value for each in KV_CODES))


def _dtypes(op: Op) -> tuple[str, ...]:
    """Types that a kernel of the op is made for: of a product's weight, a table or the KV cache, else float32."""
    if op.packed is not None:
        return ("f8f8",) if op.attrs["activations"] == "fp8" else _PRODUCTS
    return _TABLES if op.tables else _CACHES if op.uses_kv else ("f32",)


class RefTarget:
    """Slow and sure: what every other target is compared with."""

    name = "ref"
    packs_products = True
    adds_in_products = False
    frees_windows = True
    on_gpu = False

    def kernels(self) -> tuple[str, ...]:
        """`<op>.<dtype>.ref` for every op."""
        return tuple(f"{op}.{dtype}.ref" for op in op_names() for dtype in _dtypes(find_op(op)))

    def limits(self) -> KernelLimits:
        """numpy takes whatever fits into memory."""
        return KernelLimits()

    def activations(self, kernel: str) -> str:
        """Inputs of matrix products stay float32, unless they are rounded to int8 or FP8."""
        dtype = kernel.split(".")[1]
        return "fp8" if dtype == "f8f8" else "int8" if dtype.endswith("a8") else "f32"

    def build_blocker(self) -> str | None:
        """Nothing is needed."""
        return None

    def extra_sections(self, plan: Plan, progress: Progress) -> tuple[Constant, ...]:
        """No machine code."""
        return ()

    def toolchain(self) -> dict[str, str]:
        """Nothing but ingot itself."""
        return {}

    def run_blocker(self, isa: str | None = None, part: EnginePart | None = None) -> str | None:
        """Nothing: numpy runs everywhere, under every cap."""
        return None

    def kv_memory(self, plan: Plan) -> int | None:
        """The host's."""
        return None

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> Session:
        """A session that interprets `plan`, which may have been made for another target."""
        return RefSession(plan, weights, options)

    def open_ranks(
        self, plans: Sequence[Plan], weights: Sequence[npt.NDArray[np.uint8]], options: SessionOptions
    ) -> Session:
        """A session that interprets the plans of all ranks, step by step."""
        return RanksSession(plans, weights, options)


TARGETS: tuple[Target, ...] = (RefTarget(),)
