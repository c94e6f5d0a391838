"""The target `ref`: interprets any plan in numpy with the ops' references. Needs no native part."""

import numpy as np
import numpy.typing as npt

from ingot.plan import Plan
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import op_names
from ingot.plugins.target import Constant, SessionOptions, Target
from ingot.step_io import Session

_DTYPES = ("f32", "bf16")
_BY_DTYPE = ("matmul", "embedding", "rope_kv_write", "paged_attention")  # the other ops see float32 alone


class RefTarget:
    """Slow and sure: what every other target is compared with."""

    name = "ref"
    packs_products = True

    def kernels(self) -> tuple[str, ...]:
        """`<op>.<dtype>.ref` for every op."""
        return tuple(f"{op}.{dtype}.ref" for op in op_names() for dtype in (_DTYPES if op in _BY_DTYPE else ("f32",)))

    def activations(self, weight_dtype: str) -> str:
        """Inputs of matrix products stay float32, whatever the weights are."""
        return "f32"

    def unbuildable(self) -> str | None:
        """Nothing is needed."""
        return None

    def constants(self, plan: Plan) -> tuple[Constant, ...]:
        """No machine code."""
        return ()

    def missing(self, isa: str | None = None) -> str | None:
        """Nothing: numpy runs everywhere, under every cap."""
        return None

    def kv_memory(self, plan: Plan) -> int | None:
        """The host's."""
        return None

    def open_session(self, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> Session:
        """A session that interprets `plan`, which may have been made for another target."""
        return RefSession(plan, weights, options)


TARGETS: tuple[Target, ...] = (RefTarget(),)
