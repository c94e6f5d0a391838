"""Prints, as JSON, what the cuBLASLt of the installed wheel reads from our descriptors: `python -m ... read_back`.

A process of its own, since the emulated library goes by the same name.
"""

import contextlib
import ctypes
import json

from ingot.dtypes import DType
from ingot.plugins.cuda.products import Library, wheels

ROWS, N, K = 7, 130, 66
CASES = ((DType.BF16, DType.F32), (DType.BF16, DType.BF16), (DType.F16, DType.F32), (DType.F32, DType.F32))

_LAYOUT = {0: 4, 1: 4, 2: 8, 3: 8, 4: 8}  # type, order, rows, columns, stride → bytes
_TRANSPOSITIONS = {3: 4, 4: 4}
_PREFERENCES = {1: 8, 5: 4, 6: 4, 7: 4, 8: 4}  # workspace; alignments of A, B, C and D


def main() -> None:
    """One object per product, then one of the preferences."""
    library = ctypes.CDLL(wheels()[0])
    ours = Library(library)

    def read(kind: str, of: ctypes.c_void_p, sizes: dict[int, int]) -> list[int]:
        found = []
        for attribute, size in sizes.items():
            value, written = ctypes.c_uint64(0), ctypes.c_size_t(0)
            get = getattr(library, f"cublasLt{kind}GetAttribute")
            status = get(of, attribute, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written))
            assert (status, written.value) == (0, size), (kind, attribute, status)
            found.append(value.value)
        return found

    products = []
    with contextlib.ExitStack() as made:
        for dtype, out in CASES:
            planned = ours.describe(made, ROWS, N, K, dtype, out)
            layouts = {name: read("MatrixLayout", getattr(planned, name), _LAYOUT) for name in ("weight", "x", "y")}
            products.append({**layouts, "transposed": read("MatmulDesc", planned.operation, _TRANSPOSITIONS)})
        preference = ours.prefer(made, 64)
        print(json.dumps({"products": products, "preferences": read("MatmulPreference", preference, _PREFERENCES)}))


if __name__ == "__main__":
    main()
