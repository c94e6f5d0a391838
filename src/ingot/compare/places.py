"""Where values are not finite numbers: NaN and infinities of a source are compared by place.

Which of the two a sum becomes depends on its order, so they are taken for the same.
"""

import numpy as np
import numpy.typing as npt

from ingot.plan import Step

Values = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]

LARGEST = float(np.finfo(np.float32).max)  # what is larger in float64 is infinite in an engine
VANISHED = 1e-30  # a limit of zero, as kernels compute it


def are_numbers(values: Values) -> Mask:
    """Where values are finite, in float32."""
    found: Mask = np.isfinite(values) & (np.abs(values) <= LARGEST)
    return found


def vanish(step: Step, got: Values, expected: Values) -> Mask:
    """Where an activation has made nothing of minus infinity, and the source NaN, as infinity times zero is: both are
    right."""
    if step.attrs.get("activation", "none") == "none":
        return np.zeros(got.shape, np.bool_)
    found: Mask = np.isnan(expected) & (np.abs(got) <= VANISHED)
    return found
