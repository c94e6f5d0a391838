"""How much every product loses when its inputs are rounded to int8, measured on a sample text.

The plan runs once, step by step, with the ops' references and the weights as the checkpoint stores them. Of a product
no more than a block of rows is in memory, and its outputs go on without the rounding, so that every product is judged
by itself.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.builder.expressions import WeightReader, matrix_shape
from ingot.builder.pack import BLOCK_BYTES, WeightUse
from ingot.checkpoint import Checkpoint
from ingot.companions import TOKENIZER_FILE, read_tokenizer
from ingot.configs.token_ids import read_token_ids
from ingot.plan import Plan, Step
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.op import Array, Call, KvCache
from ingot.plugins.ops.matmul import epilogue
from ingot.plugins.quantised import round_to_int8
from ingot.plugins.registry import find_op
from ingot.step_io import SampleRows, StepBatch

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
        self._values: dict[str, Array] = {}
        blocks = -(-len(ids) // plan.kv.tokens_per_block)
        self._kv = KvCache(plan.kv, blocks)
        self._batch = StepBatch(
            ids=np.array(ids, np.int32),
            query_starts=np.array([0, len(ids)], np.int32),
            past_lengths=np.zeros(1, np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            logit_rows=np.arange(len(ids), dtype=np.int32),
            sample=_no_draws(),
        )
        self._run = {"matmul": self._product, "moe_gate_up": self._gate_up, "moe_down": self._down}
        self.errors: dict[str, float] = {}

    def run(self, progress: Progress | None) -> dict[str, float]:
        """The errors by product. progress: called with the stored size of each step's weights."""
        for step in self._plan.steps:
            with np.errstate(all="ignore"):  # a model may hold values that are not finite
                outputs = self._run.get(step.op, self._other)(step)
            for name, value in zip(step.outputs, outputs, strict=False):
                if name:
                    self._values[name] = value
            if progress is not None:
                progress(
                    sum(
                        self._uses[name].nbytes for name in step.inputs if name in self._uses and step.op != "embedding"
                    )
                )
        return self.errors

    def _other(self, step: Step) -> tuple[Array, ...]:
        inputs = [self._table(step, name) if name in self._uses else self._values.get(name) for name in step.inputs]
        return find_op(step.op).reference(Call(inputs=inputs, attrs=step.attrs, batch=self._batch, kv=self._kv))

    def _table(self, step: Step, name: str) -> Array:
        """A weight; of a table of an embedding only the rows that are used, the others zeros nobody reads."""
        use = self._uses[name]
        rows, cols = matrix_shape(use.tensor)
        if step.op != "embedding":
            return self._reader.read_rows(use.tensor, 0, rows).reshape(use.shape)
        numbers = self._batch.ids if name == step.inputs[0] else np.arange(len(self._batch.ids))
        table: Array = np.zeros((rows, cols), np.float32)  # pages that nobody touches take no memory
        for number in np.unique(numbers):
            table[number] = self._reader.read_rows(use.tensor, int(number), int(number) + 1)[0]
        return table

    def _product(self, step: Step) -> tuple[Array, ...]:
        x, use = self._values[step.inputs[0]], self._uses[step.inputs[1]]
        p, errors = self._multiply(x, use, 0, use.shape[0])
        self._note(step, errors)
        others = [
            None if not name else self._table(step, name) if name in self._uses else self._values[name]
            for name in step.inputs[2:]
        ]
        call = Call(inputs=[x, None, *others], attrs=step.attrs, batch=self._batch, kv=self._kv)
        return (epilogue(call, p),)

    def _gate_up(self, step: Step) -> tuple[Array, ...]:
        """Of the op moe_gate_up, expert by expert."""
        x, ids, use = self._values[step.inputs[0]], self._values[step.inputs[1]], self._uses[step.inputs[2]]
        half, errors = use.shape[1] // 2, []
        y: Array = np.zeros((*ids.shape, half), np.float32)
        for expert in np.unique(ids).astype(int).tolist():
            rows, slots = np.nonzero(ids == expert)
            p, error = self._multiply(x[rows], use, expert * use.shape[1], use.shape[1])
            y[rows, slots] = ACTIVATIONS[str(step.attrs["activation"])](p[:, :half]) * p[:, half:]
            errors.append(error)
        self._note(step, np.concatenate(errors))
        return (y.reshape(len(ids), -1),)

    def _down(self, step: Step) -> tuple[Array, ...]:
        """Of the op moe_down, expert by expert."""
        x, ids, weights = (self._values[name] for name in step.inputs[:3])
        use, errors = self._uses[step.inputs[3]], []
        each = x.reshape(*ids.shape, use.shape[2])
        y: Array = np.zeros((len(ids), use.shape[1]), np.float32)
        for expert in np.unique(ids).astype(int).tolist():
            rows, slots = np.nonzero(ids == expert)  # a row takes an expert once
            p, error = self._multiply(each[rows, slots], use, expert * use.shape[1], use.shape[1])
            y[rows] += weights[rows, slots, None] * p
            errors.append(error)
        self._note(step, np.concatenate(errors))
        return (y,)

    def _multiply(self, x: Array, use: WeightUse, first: int, n: int) -> tuple[Array, npt.NDArray[np.float64]]:
        """(x @ W.T, squared relative error of each row of it with int8 inputs), W: n rows of a weight from `first`."""
        codes, scale = round_to_int8(x)
        change: Array = codes.astype(np.float32) * scale[:, None] - x
        both = np.concatenate([x, change])  # so that every weight is read once
        p: Array = np.empty((len(x), n), np.float32)
        squares, lost = np.zeros(len(x)), np.zeros(len(x))
        block = max(1, BLOCK_BYTES // (4 * use.shape[-1]))
        for begin in range(0, n, block):
            products = both @ self._reader.read_rows(use.tensor, first + begin, first + min(begin + block, n)).T
            p[:, begin : begin + block] = products[: len(x)]
            squares += _squares(products[: len(x)])
            lost += _squares(products[len(x) :])
        return p, np.where(lost == 0, 0.0, lost / np.where(squares == 0, lost, squares))

    def _note(self, step: Step, errors: npt.NDArray[np.float64]) -> None:
        self.errors[step.name] = float(np.sqrt(errors.mean()))


def _squares(rows: Array) -> npt.NDArray[np.float64]:
    """Sum of squares of each row."""
    squares: npt.NDArray[np.float64] = np.einsum("rc,rc->r", rows, rows, dtype=np.float64)
    return squares


def _no_draws() -> SampleRows:
    empty, wide = np.empty(0, np.int32), np.empty(0, np.uint64)
    return SampleRows(
        row=empty,
        temperature=empty.astype(np.float32),
        top_k=empty,
        top_p=empty.astype(np.float32),
        seed=wide,
        counter=wide,
    )
