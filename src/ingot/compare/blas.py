"""One thread for each of numpy's products, while the blocks of a weight are shared out to threads of our own.

Two pools on the same cores keep each other waiting, and BLAS waits by spinning: on a busy machine that doubled the
processor time.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@contextlib.contextmanager
def one_thread_per_product() -> Iterator[None]:
    """Nothing changes where numpy brings no OpenBLAS of its own."""
    library = _openblas()
    if library is None:
        yield
        return
    before = int(library.scipy_openblas_get_num_threads64_())
    library.scipy_openblas_set_num_threads64_(1)
    try:
        yield
    finally:
        library.scipy_openblas_set_num_threads64_(before)


def _openblas() -> ctypes.CDLL | None:
    """The library in numpy's wheel, loaded already."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas64_*"):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "scipy_openblas_set_num_threads64_"):
            return library
    return None
