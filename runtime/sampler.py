"""Per-request sampling parameters → the arrays that a Session draws with."""

import secrets
from collections.abc import Sequence

import numpy as np

from ingot.runtime.request import Request
from ingot.step_io import SampleRows

_SEEDS = 2**64


def request_seed(seed: int | None, index: int) -> int:
    """Seed of the index-th completion of a prompt: seed + index, or a random one where none was given."""
    return secrets.randbits(64) if seed is None else (seed + index) % _SEEDS


def sample_rows(requests: Sequence[Request], rows: Sequence[int]) -> SampleRows:
    """One draw for each request, from row rows[i] of the step's logits.

    The counter is the number of tokens the request has generated, so that a draw depends on nothing but its request.
    """
    return SampleRows(
        row=np.array(rows, dtype=np.int32),
        temperature=np.array([request.temperature for request in requests], dtype=np.float32),
        top_k=np.array([request.top_k for request in requests], dtype=np.int32),
        top_p=np.array([request.top_p for request in requests], dtype=np.float32),
        seed=np.array([request.seed for request in requests], dtype=np.uint64),
        counter=np.array([request.num_generated for request in requests], dtype=np.uint64),
    )
