"""How much every product loses when its inputs are rounded to int8, measured on a sample text.

The plan runs once, step by step, with the ops' references and the weights as the checkpoint stores them. Only a
block of a product's rows is in memory at a time. Its outputs go on without the rounding, so that every product is
judged by itself. Products are computed in float64 and rounded to float32, so the order of additions, which differs
between machines, does not change the result.
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.expressions import WeightReader
from ingot.builder.pack import BLOCK_BYTES, WeightUse
from ingot.builder.stored_weight import StoredWeight
from ingot.checkpoint import Checkpoint
from ingot.companions import TOKENIZER_FILE, read_tokenizer
from ingot.configs.token_ids import read_token_ids
from ingot.plan import Plan, Step
from ingot.plugins.interpreter import Interpreter
from ingot.plugins.op import Array, make_cache
from ingot.plugins.quantised import round_to_int8
from ingot.plugins.registry import find_op
from ingot.step_io import StepBatch

SAMPLE_TEXT = Path(__file__).with_name("sample_text.txt")
MAX_TOKENS = 32

Progress = Callable[[int], None]


def sample_ids(checkpoint: Checkpoint, vocab_size: int, positions: int) -> list[int]:
    """The sample text in the model's tokens; without a tokenizer that spells it, numbers all over the vocabulary."""
    count = max(1, min(MAX_TOKENS, positions))
    ids: list[int] = []
    path = checkpoint.path / TOKENIZER_FILE
    if path.is_file():
        tokenizer = read_tokenizer(path)
        with contextlib.suppress(Exception):  # of a vocabulary that cannot spell the text; there is nothing narrower
            ids = tokenizer.encode(SAMPLE_TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
        if ids and (bos := read_token_ids(checkpoint.path).bos) is not None:
            ids = [bos, *ids]
    usable = [each for each in ids if each < vocab_size]
    return usable[:count] or [int(each) for each in np.random.default_rng(1).integers(0, vocab_size, count)]


def activation_errors(
    plan: Plan, uses: Sequence[WeightUse], reader: WeightReader, ids: Sequence[int], progress: Progress | None = None
) -> dict[str, float]:
    """By product: the root mean square over tokens of |y8 - y| / |y|, where y8 has int8 inputs. NaN: not measurable."""
    return _Measurement(plan, uses, reader, ids).run(progress)


class _Measurement:
    """One run of a plan over some tokens of one sequence, all of whose logits are wanted."""

    def __init__(self, plan: Plan, uses: Sequence[WeightUse], reader: WeightReader, ids: Sequence[int]) -> None:
        self._plan, self._reader = plan, reader
        self._uses = {use.name: use for use in uses}
        self._squares = defaultdict[str, list[npt.NDArray[np.float64]]](list)  # of the errors of rows, by product
        blocks = -(-len(ids) // plan.tokens_per_block)
        batch = StepBatch(
            ids=np.array(ids, np.int32),
            query_starts=np.array([0, len(ids)], np.int32),
            past_lengths=np.zeros(1, np.int32),
            block_tables=np.tile(np.arange(blocks, dtype=np.int32), (len(plan.caches), 1, 1)),
            logit_rows=np.arange(len(ids), dtype=np.int32),
            slots=np.full(1, -1, np.int32),
            draws=np.empty(0, np.int32),
        )
        kv = [make_cache(group, blocks) for group in plan.caches]
        self._interpreter = Interpreter(weights=self._weight, batch=batch, kv=kv)

    def run(self, progress: Progress | None) -> dict[str, float]:
        """The errors by product. progress: called with the stored size of each step's weights."""
        values: dict[str, Array] = {}
        with np.errstate(all="ignore"):  # a model may hold values that are not finite
            for step in self._interpreter.run(self._plan.steps, values):
                if progress is not None:
                    weights = () if find_op(step.op).tables else step.inputs
                    progress(sum(self._uses[name].nbytes for name in weights if name in self._uses))
        return {name: float(np.sqrt(np.concatenate(each).mean())) for name, each in self._squares.items()}

    def _weight(self, step: Step, name: str) -> "_Measured":
        def note(squares: npt.NDArray[np.float64]) -> None:
            self._squares[step.name].append(squares)

        return _Measured(use=self._uses[name], reader=self._reader, note=note)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Measured(StoredWeight):
    """Its products also say what they would lose.

    note  gets the squared relative error of each row of a product with int8 inputs
    """

    note: Callable[[npt.NDArray[np.float64]], None]

    def product(self, expert: int, x: Array) -> Array:
        codes, scale = round_to_int8(x)
        change: Array = codes.astype(np.float32) * scale[:, None] - x
        both = np.concatenate([x, change]).astype(np.float64)  # both at once, so that every weight is read once
        n, k = self.shape[-2:]
        p: Array = np.empty((len(x), n), np.float32)
        squares, lost = np.zeros(len(x)), np.zeros(len(x))
        block = max(1, BLOCK_BYTES // (4 * k))
        for begin in range(0, n, block):
            end = min(begin + block, n)
            weight = self.reader.read_rows(self.use.tensor, expert * n + begin, expert * n + end)
            products = both @ weight.astype(np.float64).T
            p[:, begin:end] = products[: len(x)]
            squares += _squares(products[: len(x)])
            lost += _squares(products[len(x) :])
        self.note(np.where(lost == 0, 0.0, lost / np.where(squares == 0, lost, squares)))
        return p


def _squares(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum of squares of each row."""
    squares: npt.NDArray[np.float64] = np.einsum("rc,rc->r", rows, rows)
    return squares
