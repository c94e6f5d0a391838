"""Decode steps (one token of every sequence, all logits wanted) as CUDA graphs, one for each size that the plan
lists.

They are captured when a session opens, from steps whose rows are all idle. Idle rows write to a spare block.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ingot.plan import Plan
from ingot.plugins.cuda.gpu import Device
from ingot.plugins.cuda.step_tables import Counts
from ingot.step_io import StepBatch


class DecodeGraphs:
    """The graphs of one session. The counts of a step decide what it launches, so they are the key of its graph."""

    def __init__(self, device: Device, plan: Plan, owned: contextlib.ExitStack | None = None) -> None:
        """owned: destroys the graphs; None: that is done with the device."""
        self._device = device
        self.sizes = plan.decode_sizes
        self._graphs: dict[Counts, Any] = {}
        self._owned = owned

    def size(self, batch: StepBatch) -> int | None:
        """The size that a decode step is filled up to; None for every other step."""
        sequences = len(batch.past_lengths)
        if len(batch.ids) != sequences or not np.array_equal(batch.logit_rows, np.arange(sequences)):
            return None
        return next((size for size in self.sizes if size >= sequences), None)

    def capture(self, counts: Counts, launch: Callable[[], None]) -> None:
        """`launch` enqueues the work of a step with these counts. It has run before: libraries load what they need on
        first use, which a capture forbids."""
        self._graphs[counts] = self._device.capture(launch, self._owned)

    def run(self, counts: Counts, launch: Callable[[], None]) -> None:
        """Replay the graph of these counts; launch where there is none."""
        graph = self._graphs.get(counts)
        if graph is None:
            launch()
        else:
            self._device.replay(graph)
