"""The best token of a row of logits, out of products with 4-bit codes of lm_head for the whole vocabulary and exact
ones with its w8 codes for the few tokens that can still be the best: half of lm_head's bytes.

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

import numpy as np

from ingot.plan import Rows
from ingot.plugins.op import Array, Call, Op
from ingot.plugins.quantised import QuantisedRows, round_to_int8
from ingot.plugins.weight_values import product

GROUP = 128  # columns that share a multiplier of the codes, all of which are 1
STEP = 17
SPREAD = 9.5
SLACK = 2.0**-13
TINY = np.float32(2.0**-80)
MOST = 8  # a row of which more than one in this many tokens can be the best is not decided
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


def decide(x: Array, centres: Array, scale: Array, spread: Array, table: QuantisedRows) -> tuple[Array, Array]:
    """Rows x [R, K] → (the best token of each, -1 where it is not decided; how many candidates it had).

    centres  [R, vocab]: A sx s, as the product with `half_codes` gives them
    scale    [vocab]: s
    spread   [K]: d
    table    rows of w8, of which the first [vocab] are lm_head's
    """
    ids, counts = np.full(len(x), -1.0, np.float32), np.zeros(len(x), np.float32)
    codes, scales = round_to_int8(x)
    for row in range(len(x)):
        known, reach = bound(codes[row], scales[row], spread)
        with np.errstate(invalid="ignore", over="ignore"):
            steps = scales[row] * scale
            likely = np.float32(STEP) * centres[row] + steps * np.float32(known)
            if not np.isfinite(likely).all():
                continue
            least = _logits(x, row, table, np.array([np.argmax(likely)]))[0] - TINY
            highest = np.float32(STEP) * centres[row] + steps * np.float32(known + reach)
        candidates = np.flatnonzero(highest >= least)
        counts[row] = len(candidates)
        if len(candidates) * MOST > centres.shape[1]:
            continue
        logits = _logits(x, row, table, candidates)
        if np.isfinite(logits).all():
            ids[row] = candidates[np.argmax(logits)]
    return ids, counts


def _logits(x: Array, row: int, table: QuantisedRows, tokens: np.typing.NDArray[np.int64]) -> Array:
    """The bits of the full product's."""
    logits: Array = product(x[row : row + 1], table.take(tokens), "int8")[0]
    return logits


def reference(call: Call) -> tuple[Array, ...]:
    """The tokens and the numbers of candidates as columns, [R, 1] each (a session returns the former's draws)."""
    codes, table = call.inputs[2], call.inputs[4]
    assert isinstance(codes, QuantisedRows), "codes of a screen are w4"
    assert isinstance(table, QuantisedRows), "exact rows of a screen are w8"
    ids, counts = decide(call.required(0), call.required(1), codes.scale, call.required(3), table)
    return ids[:, None], counts[:, None]


OP = Op(
    name="screen",
    # [rows, K]; [rows, vocab], the product of x and codes; [vocab, K] packed; [K]; rows of w8 [vocab or more, K]
    inputs=("x", "centres", "codes", "dither", "table"),
    outputs=(),
    attrs={"group": GROUP},
    out_cols=lambda cols, attrs: (),
    reference=reference,
    is_step=False,
    tables={4: lambda plan: plan.vocab_size},
    rows=Rows.LOGITS,
)
