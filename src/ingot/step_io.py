"""What crosses between the runtime and a Session in one step: a ragged batch in, token ids out.

token-major ragged batch, 3 sequences, T = 7          query_starts = [0, 5, 6, 7]
┌─────────────────────┬───┬───┐
│ prefill chunk of A  │ B │ C │   B and C decode one token each
└─────────────────────┴───┴───┘
  past_lengths[s] tokens of sequence s are in the KV cache before the step;
  token i of sequence s has position past_lengths[s] + i.
"""

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """How to draw one token for each of Q logit rows. All arrays have length Q.

    row          index into the R logit rows of the step
    temperature  0 is greedy (lowest id wins ties); otherwise logits are divided by it
    top_k        keep the k most likely tokens, 0 keeps all
    top_p        then keep the smallest head of the sorted tokens whose probability reaches top_p; 1 keeps all
    seed         stream of the request
    counter      index of the draw within the stream: the number of tokens the request has generated so far
    """

    row: Int32
    temperature: Float32
    top_k: Int32
    top_p: Float32
    seed: npt.NDArray[np.uint64]
    counter: npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One step.

    ids           int32 [T]
    query_starts  int32 [S + 1], first 0, last T
    past_lengths  int32 [S]
    block_tables  int32 [S, W], C-contiguous: block of tokens [w * tokens_per_block, ...); unused entries -1
    logit_rows    int32 [R]: token indices whose logits are wanted, ascending
    sample        how to draw from them
    want_logits   copy the R rows of logits out
    """

    ids: Int32
    query_starts: Int32
    past_lengths: Int32
    block_tables: Int32
    logit_rows: Int32
    sample: SampleRows
    want_logits: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """ids int32 [Q]; log_probs float32 [Q]: natural-log probability of each drawn token under softmax(raw logits);
    logits float32 [R, vocab] or None."""

    ids: Int32
    log_probs: Float32
    logits: Float32 | None


class Session(Protocol):
    """An Engine loaded on a device. Not thread-safe: one step at a time."""

    num_blocks: int

    def run(self, batch: StepBatch) -> StepResult:
        """Execute the plan once. Block 0 .. num_blocks-1 may appear in block tables."""
        ...

    def close(self) -> None:
        """Release memory; the session cannot run afterwards."""
        ...
