"""The activation functions of ops `matmul`, `activation` and `moe_gate_up`, in numpy: the only list in Python."""

import math
from collections.abc import Callable

import numpy as np

from ingot.plugins.op import Array


def sigmoid(x: Array) -> Array:
    # exp of a negative number only: never overflows
    z = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + z), z / (1 + z)).astype(np.float32)


def _erf(x: Array) -> Array:
    # Abramowitz and Stegun 7.1.26 is too coarse (1.5e-7 absolute is near float32's limit, so evaluate in float64)
    erf: Array = np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64)).astype(np.float32)
    return erf


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: (0.5 * x * (1 + _erf(x * np.float32(0.7071067811865476)))).astype(np.float32),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + np.tanh(np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)))
    ).astype(np.float32),
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "relu2": lambda x: np.square(np.maximum(x, np.float32(0))),
}
