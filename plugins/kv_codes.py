"""Keys and values as codes times a scale for each token and head: what int8 and FP8 (E4M3) KV caches hold."""

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType
from ingot.plugins.f8_rows import round_inputs
from ingot.plugins.quantised import round_to_int8

Float32 = npt.NDArray[np.float32]


def round_to_codes(rows: Float32, dtype: DType) -> tuple[Float32, Float32]:
    """Rows [rows, dims] as (codes float32 [rows, dims], scales float32 [rows]); a row is codes * scale. The largest
    magnitude of a row becomes the largest code: 127 in int8, 448 in f8.

    A row that is too small for a scale becomes zeros; one that holds a NaN or an infinity gets the scale NaN.
    """
    if dtype is DType.F8:
        numbers, scales = round_inputs(rows)
        return numbers, scales[:, 0]
    codes, scale = round_to_int8(rows)
    return codes.astype(np.float32), scale
