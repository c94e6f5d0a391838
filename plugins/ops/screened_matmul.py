"""Product of lm_head that may leave out all logits but the best: 4-bit codes of its weight find, for the whole
vocabulary, the few tokens that can still be the best, and these are computed exactly. That reads half of its bytes.

Row v of lm_head has codes c and a scale s, a row of activations codes x and a scale sx; the exact sum of a token is
S = sum c x. Every column k has a number d of 0 .. 16, drawn once, the same for all rows: h = (c + 127 + d) // 17 - 8
is a code of 4 bits, and e = (c + 127 + d) % 17 what is lost. So c = 17 h + 9 - d + e, and

    S = 17 A + D + E      A = sum h x      D = sum (17 - d) x, the same for all tokens      E = sum (e - 8) x

Whatever c is, e is uniform on 0 .. 16, and independent of all other columns, since d is. A uniform number on -8 .. 8
is no wider than a normal one of its variance, 24: log E[exp(t (e - 8))] = log(sinh(17 t / 2) / (17 sinh(t / 2))) is by
Euler's product a sum of log(1 + 289 u / n^2) - log(1 + u / n^2) with u = (t / 2 pi)^2, each concave in u, and so at
most its tangent in 0, 24 t^2 / 2. Hence E < -SPREAD sqrt(24 sum x^2), and E > SPREAD sqrt(24 sum x^2), each have a
probability of at most exp(-SPREAD^2 / 2) < 2^-64; and never |E| > 8 sum |x|. With B the smaller of the two, a token
with s sx (17 A + D + B) below the logit of any token is not the best. Only the best one itself may be lost, and which
token that is does not depend on d: so the answer is wrong in less than one row of 2^64, for all tokens together,
whatever the weights and activations are.

Roundings: 17 A, D, B and S are at most 136, 17, 8 and 127 times sum |x|; what a kernel computes with them in float32,
seven roundings at most, and the rounding of the logits, three, are together less than 2^-13 s sx sum |x| away from
exact, which is added to B; where numbers are so small that float32 loses more, TINY.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ingot.plan import Attr, Rows, Step
from ingot.plugins.attributes import PRODUCT_RULES, one_of
from ingot.plugins.op import Array, Call, Op, Shapes
from ingot.plugins.quantised import QuantisedRows, round_to_int8
from ingot.plugins.weight_values import product
from ingot.plugins.work import OpUse
from ingot.step_work import Work

GROUP = 128  # columns that share a multiplier of the codes, all of which are 1
STEP = 17
SPREAD = 9.5
SLACK = 2.0**-13
TINY = np.float32(2.0**-80)
MOST = 8  # a row of which more than one in this many tokens can be the best is not decided
MOST_ROWS = 4  # with more rows arithmetic takes the time, not reading
_SEED = 0x16E07


def dither(k: int) -> Array:
    """d of k columns, float32: Philox4x64-10 keyed by a constant, so that it depends on no weight and no input."""
    words = np.random.Philox(key=_SEED).random_raw(k)
    return ((words >> np.uint64(32)) * np.uint64(STEP) >> np.uint64(32)).astype(np.float32)


def half_codes(rows: QuantisedRows) -> QuantisedRows:
    """Rows of w8 → their 4-bit codes h, with the same scales: of w4g128, whose multipliers are 1."""
    n, k = rows.shape
    wide = rows.codes.astype(np.int16) + np.int16(127) + dither(k).astype(np.int16)
    codes = (wide // np.int16(STEP) - np.int16(8)).astype(np.int8)
    return QuantisedRows(scale=rows.scale, codes=codes, multipliers=np.ones((n, -(-k // GROUP)), np.int8), group=GROUP)


def bound(codes: Array, scale: float, spread: Array) -> tuple[float, float]:
    """(D, B) of a row of activations: its codes [K], and d. NaN where the row is not finite."""
    wide = codes.astype(np.int64)
    size = int(np.abs(wide).sum())
    reach = min(SPREAD * float(np.sqrt(24.0 * int((wide * wide).sum()))), 8.0 * size) + SLACK * size
    known = int(((STEP - spread.astype(np.int64)) * wide).sum())
    return (float(known), reach) if np.isfinite(scale) else (np.nan, np.nan)


def candidates(x: Array, estimates: Array, head: QuantisedRows) -> list[npt.NDArray[np.int64] | None]:
    """Tokens of each of the rows x [R, K] that can be the best; None where too many can, or numbers are not finite.

    estimates  [R, vocab]: A sx s, the product with `half_codes` of the w8 rows of lm_head
    """
    found: list[npt.NDArray[np.int64] | None] = []
    spread = dither(x.shape[1])
    codes, scales = round_to_int8(x)
    for row in range(len(x)):
        known, reach = bound(codes[row], scales[row], spread)
        with np.errstate(invalid="ignore", over="ignore"):
            steps = scales[row] * head.scale
            likely = np.float32(STEP) * estimates[row] + steps * np.float32(known)
            if not np.isfinite(likely).all():
                found.append(None)
                continue
            least = _logits(x, row, head, np.array([np.argmax(likely)]))[0] - TINY
            highest = np.float32(STEP) * estimates[row] + steps * np.float32(known + reach)
        tokens = np.flatnonzero(highest >= least)
        few = len(tokens) * MOST <= len(head.scale) and np.isfinite(_logits(x, row, head, tokens)).all()
        found.append(tokens if few else None)
    return found


def screened(x: Array, head: QuantisedRows) -> Array:
    """What a kernel leaves of rows of which nobody wants more than the best token, [R, vocab]: the logits of those that
    can be it, all others -inf; all logits where that does not decide every row."""
    y = product(x, head, "int8")
    found = candidates(x, product(x, half_codes(head), "int8"), head)
    if len(x) > MOST_ROWS or any(tokens is None for tokens in found):
        return y
    left = np.full_like(y, -np.inf)
    for row, tokens in enumerate(found):
        left[row, tokens] = y[row, tokens]
    return left


def _logits(x: Array, row: int, head: QuantisedRows, tokens: npt.NDArray[np.int64]) -> Array:
    """The bits of the full product's."""
    logits: Array = product(x[row : row + 1], head.take(tokens), "int8")[0]
    return logits


def reference(call: Call) -> tuple[Array, ...]:
    """All logits: a step may leave out some where `whole_rows` is 0, and need not."""
    (y,) = call.weight(1).products([(0, call.required(0))], "int8")
    return (y,)


def plain(step: Step) -> Step:
    """The product that it may leave a part of."""
    attrs: dict[str, Attr] = {
        "activation": "none",
        "gated": 0,
        "activations": step.attrs["activations"],
        "group": step.attrs["group"],
    }
    inputs = (*step.inputs[:2], "", "")
    return dataclasses.replace(step, op="matmul", kernel=str(step.attrs["product"]), inputs=inputs, attrs=attrs)


def same_rows(rows: QuantisedRows) -> QuantisedRows:
    """The table has the rows of the weight."""
    return rows


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """All weights are of as many columns as x, and have a row for each of the product's."""
    (k,), weight, codes, spread, table = shapes[0] or (0,), *(shape or () for shape in shapes[1:5])
    if len(weight) != 2 or codes != weight or weight[1] != k or spread != (k,):
        return f"an input of {k} columns does not fit weights of {weight}, {codes} and {spread}"
    if len(table) != 2 or table[1] != k or table[0] < weight[0]:
        return f"the table {table} has no row for each of {weight}"
    return None


def reads(best_rows: int) -> tuple[int, ...]:
    """Codes and dither where a step wants the best tokens of this many rows and nothing else, 0: more than that."""
    return (2, 3) if 0 < best_rows <= MOST_ROWS else (1,)


def work(use: OpUse) -> Work:
    """A screen counts without the rows of its candidates: how many there are is not known beforehand."""
    n, k = use.weight(1).shape
    best_rows = use.rows if use.load.best_only else 0
    nbytes = use.activation_bytes + sum(use.weight(index).nbytes for index in reads(best_rows))
    done = Work(nbytes=nbytes, operations=2 * use.rows * n * k)
    if reads(best_rows) == reads(0):
        return done
    return done + Work(nbytes=8 * use.rows * n, operations=8 * use.rows * n)  # estimates are read twice


OP = Op(
    name="screened_matmul",
    # [rows, K]; [vocab, K] w8, packed; its 4-bit codes, packed; [K]; rows of w8 [vocab or more, K]; [rows], of the step
    inputs=("x", "weight", "codes", "dither", "table", "whole_rows"),
    outputs=("y",),  # [rows, vocab]
    # product, estimate: the kernels of matmul that multiply with weight and codes
    attrs={"activations": "int8", "group": 0, "product": str, "estimate": str},
    out_cols=lambda cols, attrs: (cols[1] or 0,),
    reference=reference,
    size_problem=size_problem,
    attr_rules={**PRODUCT_RULES, "activations": one_of("int8"), "group": one_of(0)},
    work=work,
    plain=plain,
    reads=reads,
    packed=1,
    derived={2: half_codes, 4: same_rows},
    constants={3: dither},
    vectors=(3,),
    tables={4: lambda plan: plan.vocab_size},
    batch_inputs={5: 0},
    rows=Rows.LOGITS,
)
