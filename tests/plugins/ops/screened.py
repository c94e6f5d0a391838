"""Rows of activations and weights of lm_head, usual ones and such as a screen could stumble over."""

from collections.abc import Callable, Mapping

import numpy as np

from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows

VOCAB = 1000
Case = Callable[[int], tuple[Array, QuantisedRows]]
"""K → x [rows, K], at most four of them, and w8 rows [VOCAB, K]"""


def rows_of(n: int, k: int) -> Array:
    return np.random.default_rng(n * k).standard_normal((n, k)).astype(np.float32)


def head_of(n: int, k: int) -> QuantisedRows:
    """Rows of normal numbers, each cut off at its own three standard deviations, as trained ones about are."""
    random = np.random.default_rng(n + k)
    codes = np.clip(np.rint(random.standard_normal((n, k)) * 42), -127, 127).astype(np.int8)
    return QuantisedRows(scale=random.uniform(0.8, 1.2, n).astype(np.float32) * np.float32(1e-3), codes=codes)


def _usual(k: int) -> tuple[Array, QuantisedRows]:
    return rows_of(4, k), head_of(VOCAB, k)


def _equal_rows(k: int) -> tuple[Array, QuantisedRows]:
    head = head_of(VOCAB, k)
    head.codes[:], head.scale[:] = head.codes[3], head.scale[3]
    return rows_of(4, k), head


def _ties_at_the_top(k: int) -> tuple[Array, QuantisedRows]:
    """The best row three times: the lowest id wins."""
    x, head = rows_of(1, k), head_of(VOCAB, k)
    best = np.where(x[0] >= 0, 127, -127).astype(np.int8)
    for token in (995, 417, 418):
        head.codes[token], head.scale[token] = best, np.float32(2e-3)
    return x, head


def _near_ties(k: int) -> tuple[Array, QuantisedRows]:
    """Thirty rows at the top that differ by one code, or by the last bit of a scale."""
    x, head = _ties_at_the_top(k)
    for token in range(100, 130):
        head.codes[token] = head.codes[995]
        head.scale[token] = np.nextafter(np.float32(2e-3), np.float32(token % 3 - 1))
        head.codes[token, token % k] -= np.sign(head.codes[token, token % k]) * np.int8(token % 2)
    return x, head


def _zeros(k: int) -> tuple[Array, QuantisedRows]:
    return np.zeros((2, k), np.float32), head_of(VOCAB, k)


def _rows_of_zeros(k: int) -> tuple[Array, QuantisedRows]:
    """Weights whose scale is 0, as unused tokens have; all other logits are below 0."""
    x, head = rows_of(1, k), head_of(VOCAB, k)
    head.codes[:] = np.where(x[0] >= 0, -1, 1) * np.abs(head.codes)
    head.scale[500:510] = 0
    return x, head


def _outlier_rows(k: int) -> tuple[Array, QuantisedRows]:
    head = head_of(VOCAB, k)
    head.scale[::97] *= np.float32(300)
    return rows_of(4, k), head


def _outlier_columns(k: int) -> tuple[Array, QuantisedRows]:
    x = rows_of(4, k)
    x[:, : 1 + k // 50] *= 200
    return x, head_of(VOCAB, k)


def _one_hot(k: int) -> tuple[Array, QuantisedRows]:
    x = np.zeros((3, k), np.float32)
    x[[0, 1, 2], [0, k // 2, k - 1]] = (1, -2, 1e-3)
    return x, head_of(VOCAB, k)


def _negative(k: int) -> tuple[Array, QuantisedRows]:
    """Every logit is below 0."""
    head = head_of(VOCAB, k)
    head.codes[:] = -np.maximum(np.abs(head.codes), 1)
    return np.abs(rows_of(4, k)) + np.float32(0.1), head


def _extreme_codes(k: int) -> tuple[Array, QuantisedRows]:
    head = head_of(VOCAB, k)
    head.codes[:] = np.where(head.codes >= 0, 127, -127)
    return np.sign(rows_of(4, k)), head


CASES: Mapping[str, Case] = {
    "usual": _usual,
    "equal rows": _equal_rows,
    "ties": _ties_at_the_top,
    "near ties": _near_ties,
    "zeros": _zeros,
    "rows of zeros": _rows_of_zeros,
    "outlier rows": _outlier_rows,
    "outlier columns": _outlier_columns,
    "one hot": _one_hot,
    "negative": _negative,
    "extreme codes": _extreme_codes,
}
