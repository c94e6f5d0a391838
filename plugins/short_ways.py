"""What the header of a panel of codes says of all its groups.

Kernels that know it make the numbers in fewer steps, with the same bits. A panel that says nothing is right, too.
"""

import numpy as np
import numpy.typing as npt

SCALES_OF_FEW_BITS = 1
"""Each scale has at most six significant bits, as those of MXFP4 and NVFP4."""
WHOLE_SHIFTS = 2
"""Each shift is a zero point, a whole number from -16 to 16."""
_Halves = npt.NDArray[np.float16]


def short_ways(scales: _Halves, shifts: _Halves | None, is_offset: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """For each panel the sum of what holds. scales, shifts: [panels, groups, 16]. is_offset: [panels]."""
    ways = np.where((scales.view(np.uint16) & 0x1F == 0).all(axis=(1, 2)), SCALES_OF_FEW_BITS, 0)
    if shifts is not None:
        whole = (shifts == np.rint(shifts)) & (np.abs(shifts) <= 16)
        ways += np.where(whole.all(axis=(1, 2)) & ~is_offset, WHOLE_SHIFTS, 0)
    return ways.astype(np.uint8)
