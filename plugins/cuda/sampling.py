"""The end of a step on a GPU: from logits in its memory to drawn tokens on the host.

Tokens are drawn on the device, but on the host, from copied logits, where a draw has rules (penalties, biases, min-p)
or wants more probabilities than its own. What the sequences hold is on the host.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.plan import Plan
from ingot.plugins.cuda.gpu import Arguments, Device, Kernel
from ingot.plugins.cuda.work import draw_arguments
from ingot.plugins.ops.sample import Draw, Drawn, sample
from ingot.plugins.sequences import Sequences
from ingot.step_io import StepBatch, StepResult

KERNEL = "draw_tokens"

_INT = 4
_THREADS = 512


class Draws:
    """Of one session."""

    def __init__(self, device: Device, kernel: Kernel, plan: Plan, tables: Mapping[str, int]) -> None:
        """tables: addresses of a step's integers on the device."""
        self._device, self._kernel, self._plan, self._tables = device, kernel, plan, tables
        self._most = plan.limits.max_logit_rows
        self._host = device.pinned(2 * _INT * self._most)
        self._at = device.allocate(2 * _INT * self._most)

    def result(self, batch: StepBatch, draws: Sequence[Draw], sequences: Sequences, logits_at: int) -> StepResult:
        """Waits for the step. logits_at: float32 [wanted rows, vocab] on the device."""
        plain = all(draw.known < 0 and draw.rules.plain for draw in draws) and 0 < len(draws) <= self._most
        logits = np.empty((len(batch.logit_rows), self._plan.vocab_size), np.float32)
        if batch.want_logits or (not plain and draws):
            self._device.fetch(logits, logits_at)
        drawn = self._draw(len(draws), logits_at) if plain else None
        self._device.wait()
        if drawn is None:
            drawn = sample(logits, draws)
        else:
            drawn = dataclasses.replace(drawn, ids=drawn.ids.copy(), log_probs=drawn.log_probs.copy())
        result = sequences.take(batch, drawn)
        return dataclasses.replace(result, logits=logits) if batch.want_logits else result

    def _draw(self, count: int, logits_at: int) -> Drawn:
        """Ids and log probabilities of the first `count` draws, there after `wait`."""
        half = _INT * self._most
        arguments = Arguments(draw_arguments(self._at, self._at + half, logits_at, self._tables, self._plan.vocab_size))
        self._device.launch(self._kernel, (count, 1, 1), _THREADS, 0, arguments)
        ids = self._host[: _INT * count].view(np.int32)
        log_probs = self._host[half : half + _INT * count].view(np.float32)
        self._device.fetch(ids, self._at)
        self._device.fetch(log_probs, self._at + half)
        return Drawn(ids=ids, log_probs=log_probs)
