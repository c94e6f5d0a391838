"""What a step carries, and what it must move and compute: `plugins/plan_work.py` makes the one of the other."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a step carries. sequences: (tokens in the KV cache before, tokens of this step) of each; logit_rows: how
    many rows of logits are wanted; best_only: nobody wants more of them than the best token of each."""

    sequences: Sequence[tuple[int, int]]
    logit_rows: int
    best_only: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(count for _, count in self.sequences)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """nbytes: weights, keys, values and activations read and written, each once; a multiply-add is two operations.

    Experts: as many are read as the rows choose, if each row chooses at random.
    """

    nbytes: int
    operations: int

    def __add__(self, other: "Work") -> "Work":
        return Work(nbytes=self.nbytes + other.nbytes, operations=self.operations + other.operations)
