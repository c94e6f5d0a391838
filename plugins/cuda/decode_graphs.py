"""Decode steps (one token of every sequence, all logits wanted) as CUDA graphs, one per bucket of batch sizes.

The first step of a bucket runs launch by launch, the second one is captured, later ones are replayed. Idle rows of a
bucket write to a spare block.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.plan import Limits
from ingot.plugins.cuda.gpu import Device
from ingot.plugins.cuda.shapes import batch_buckets
from ingot.step_io import StepBatch


class DecodeGraphs:
    """Of one session."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self._buckets = batch_buckets(min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows))
        self._graphs: dict[int, Any] = {}
        self._seen: set[int] = set()

    def bucket(self, batch: StepBatch) -> int | None:
        """The size that a decode step is filled up to; None for every other step."""
        sequences = len(batch.past_lengths)
        if len(batch.ids) != sequences or not np.array_equal(batch.logit_rows, np.arange(sequences)):
            return None
        return next((bucket for bucket in self._buckets if bucket >= sequences), None)

    def run(self, bucket: int, launch: Callable[[], None]) -> None:
        """`launch` enqueues the step's work, the same for every step of a bucket."""
        if bucket not in self._seen:  # libraries load what they need on first use, which a capture forbids
            self._seen.add(bucket)
            launch()
            return
        if bucket not in self._graphs:
            self._device.begin_capture()
            launch()
            self._graphs[bucket] = self._device.end_capture()
        self._device.replay(self._graphs[bucket])
