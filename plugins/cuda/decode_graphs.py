"""Decode steps (one token of every sequence, all logits wanted) as CUDA graphs, one per bucket of batch sizes.

They are captured when a session opens, from steps whose rows are all idle. Idle rows write to a spare block.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.plan import Limits
from ingot.plugins.cuda.gpu import Device
from ingot.plugins.cuda.shapes import batch_buckets
from ingot.plugins.cuda.step_tables import Counts
from ingot.step_io import StepBatch


class DecodeGraphs:
    """The graphs of one session. The counts of a step decide what it launches, so they are the key of its graph."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self._device = device
        self.buckets = batch_buckets(min(limits.max_batch_size, limits.max_num_tokens, limits.max_logit_rows))
        self._graphs: dict[Counts, Any] = {}

    def bucket(self, batch: StepBatch) -> int | None:
        """The size that a decode step is filled up to; None for every other step."""
        sequences = len(batch.past_lengths)
        if len(batch.ids) != sequences or not np.array_equal(batch.logit_rows, np.arange(sequences)):
            return None
        return next((bucket for bucket in self.buckets if bucket >= sequences), None)

    def capture(self, counts: Counts, launch: Callable[[], None]) -> None:
        """`launch` enqueues the work of a step with these counts. It has run before: libraries load what they need on
        first use, which a capture forbids."""
        self._graphs[counts] = self._device.capture(launch)

    def run(self, counts: Counts, launch: Callable[[], None]) -> None:
        """Replay the graph of these counts; launch where there is none."""
        graph = self._graphs.get(counts)
        if graph is None:
            launch()
        else:
            self._device.replay(graph)
