"""What NVFP4 and MXFP4 share: codes E2M1, two to a byte, the low nibble first."""

import numpy as np

from ingot.convert.quantised.bits import nibbles
from ingot.convert.quantised.form import Code, Piece, Quantised, Rows
from ingot.convert.quantised.module import Module
from ingot.tensor_file import read_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def read_fp4(
    module: Module,
    codes: str,
    scale: str,
    group: int,
    scales: tuple[str, ...],
    factor: str = "",
    *,
    divides: bool = False,
) -> Quantised:
    """codes, scale, factor: the tensors that hold them. scales: types that the scales may have."""
    tensor = module.part(codes, ("U8",), 2)
    n, k = tensor.shape[0], 2 * tensor.shape[1]
    module.part(scale, scales, 2)
    module.require(scale, (n, -(-k // group)))
    if k % group:
        module.require(codes, (n, -(-k // group) * group // 2))

    def load() -> Rows:
        return lambda begin, end: nibbles(read_rows(tensor, begin, end).view(np.uint8))

    pieces: dict[str, Piece | None] = {
        "scale": module.scale_piece(scale, (n, k // group)),
        "factor": module.factor_piece(factor, n) if factor else None,
    }
    return module.made((n, k), Code.U4, group, load, pieces, table=E2M1, divides=divides, codes=codes)
