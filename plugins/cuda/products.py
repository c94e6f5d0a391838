"""Matrix products through cuBLASLt, called by its C interface.

Ours are row-major: y[rows, n] = x[rows, k] @ weight[n, k]^T (+ y0). cuBLASLt is column-major, so that it computes
y^T[n, rows] = weight * x^T with the weight transposed: no byte moves.
"""

import contextlib
import ctypes
import dataclasses
import math

from ingot.dtypes import DType
from ingot.errors import TargetError
from ingot.plugins.cuda.wheels import in_wheels

INSTALL = "pip install nvidia-cublas"
WORKSPACE_BYTES = 32 << 20

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_IN_WHEELS = ("cu13/lib", "cublas/lib")
_DATA_TYPE = {DType.F32: 0, DType.F16: 2, DType.BF16: 14}  # cudaDataType
_COMPUTE_32F = 68  # cublasComputeType: float32 sums, no tf32
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes
_MAX_WORKSPACE, _MIN_ALIGNMENT_A = 1, 5  # cublasLtMatmulPreferenceAttributes; B, C, D follow A
_TRANSPOSED, _PLAIN = 1, 0  # cublasOperation


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One product. x and weight have type `dtype`, y and y0 `out`. Addresses; y0 = 0: nothing is added."""

    x: int
    weight: int
    y: int
    y0: int
    n: int
    k: int
    dtype: DType
    out: DType


def find_library() -> ctypes.CDLL | str:
    """cuBLASLt, or what to install."""
    for name in (*_NAMES, *wheels()):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return f"cuBLASLt is not here; {INSTALL}"


def wheels() -> list[str]:
    """Where wheels of NVIDIA have put the library."""
    return in_wheels(_NAMES, _IN_WHEELS)


class Library:
    """cuBLASLt with its return codes checked, and the descriptors of a product, which need no GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: object) -> None:
        """Raises TargetError where the library says no."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise TargetError("cuBLASLt reports an error", where=name, got=f"status {status}")

    def describe(self, made: contextlib.ExitStack, rows: int, n: int, k: int, dtype: DType, out: DType) -> "Planned":
        """y^T[n, rows] = weight^T[k, n] transposed * x^T[k, rows], without an algorithm yet. made: gives the
        descriptors back when it is closed."""
        operation = ctypes.c_void_p()
        self.call("cublasLtMatmulDescCreate", ctypes.byref(operation), _COMPUTE_32F, _DATA_TYPE[DType.F32])
        made.callback(self.call, "cublasLtMatmulDescDestroy", operation)
        for attribute, how in ((_TRANSA, _TRANSPOSED), (_TRANSB, _PLAIN)):
            value, size = ctypes.c_int32(how), ctypes.c_size_t(4)
            self.call("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.byref(value), size)
        return Planned(
            operation=operation,
            weight=self._layout(made, dtype, k, n),
            x=self._layout(made, dtype, k, rows),
            y=self._layout(made, out, n, rows),
            heuristic=_Heuristic(),
        )

    def prefer(self, made: contextlib.ExitStack, alignment: int) -> ctypes.c_void_p:
        """What an algorithm may count on: workspace, and that every matrix lies on a multiple of `alignment`."""
        preference = ctypes.c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        made.callback(self.call, "cublasLtMatmulPreferenceDestroy", preference)
        limits: dict[int, ctypes.c_uint64 | ctypes.c_uint32] = {_MAX_WORKSPACE: ctypes.c_uint64(WORKSPACE_BYTES)}
        limits |= {_MIN_ALIGNMENT_A + i: ctypes.c_uint32(alignment) for i in range(4)}
        for attribute, limit in limits.items():
            size = ctypes.c_size_t(ctypes.sizeof(limit))
            self.call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(limit), size)
        return preference

    def _layout(self, made: contextlib.ExitStack, dtype: DType, rows: int, cols: int) -> ctypes.c_void_p:
        """Column-major without gaps."""
        layout = ctypes.c_void_p()
        self.call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            _DATA_TYPE[dtype],
            ctypes.c_uint64(rows),
            ctypes.c_uint64(cols),
            ctypes.c_int64(rows),
        )
        made.callback(self.call, "cublasLtMatrixLayoutDestroy", layout)
        return layout


class Products:
    """A handle of the library. Algorithms are looked up once per shape; all products run on one stream."""

    def __init__(self, workspace: int, stream: int) -> None:
        """workspace: WORKSPACE_BYTES of device memory."""
        library = find_library()
        if isinstance(library, str):
            raise TargetError(
                "this machine has no cuBLASLt, which the engine needs",
                got=library,
                hint=f"{INSTALL}, or build the engine with --gemm_plugin disable",
            )
        self._library, self._workspace, self._stream = Library(library), workspace, stream
        self._handle = ctypes.c_void_p()
        self._library.call("cublasLtCreate", ctypes.byref(self._handle))
        self._made = contextlib.ExitStack()
        self._made.callback(self._library.call, "cublasLtDestroy", self._handle)
        self._plans: dict[tuple[int, int, int, DType, DType, int], Planned] = {}

    def run(self, product: Product, rows: int) -> None:
        """Asynchronous, in the order of the stream."""
        addresses = math.gcd(product.weight, product.x, product.y0 or product.y, product.y)
        alignment = min(256, addresses & -addresses)
        shape = (rows, product.n, product.k, product.dtype, product.out, alignment)
        planned = self._plans.get(shape)
        if planned is None:
            planned = self._plans[shape] = self._plan(*shape)
        one, beta = ctypes.c_float(1), ctypes.c_float(1 if product.y0 else 0)
        pointer = ctypes.c_void_p
        self._library.call(
            "cublasLtMatmul",
            self._handle,
            planned.operation,
            ctypes.byref(one),
            pointer(product.weight),
            planned.weight,
            pointer(product.x),
            planned.x,
            ctypes.byref(beta),
            pointer(product.y0 or product.y),
            planned.y,
            pointer(product.y),
            planned.y,
            ctypes.byref(planned.heuristic.algo),
            pointer(self._workspace),
            ctypes.c_size_t(WORKSPACE_BYTES),
            pointer(self._stream),
        )

    def close(self) -> None:
        """Give handle and descriptors back."""
        self._plans.clear()
        self._made.close()

    def _plan(self, rows: int, n: int, k: int, dtype: DType, out: DType, alignment: int) -> "Planned":
        planned, found = self._library.describe(self._made, rows, n, k, dtype, out), ctypes.c_int(0)
        with contextlib.ExitStack() as needed:
            preference = self._library.prefer(needed, alignment)
            self._library.call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                planned.operation,
                planned.weight,
                planned.x,
                planned.y,
                planned.y,
                preference,
                1,
                ctypes.byref(planned.heuristic),
                ctypes.byref(found),
            )
        if found.value < 1:
            raise TargetError(
                "cuBLASLt has no algorithm for a matmul",
                got=f"{rows} x {n} x {k} in {dtype.value}",
                hint="build the engine with --gemm_plugin disable, which needs no cuBLASLt",
            )
        return planned


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Descriptors and algorithm of one shape."""

    operation: ctypes.c_void_p
    weight: ctypes.c_void_p
    x: ctypes.c_void_p
    y: ctypes.c_void_p
    heuristic: _Heuristic
