"""What an engine's plan comes to in float64: its packed weights as they are, and the roundings that its kernels made.

Rounding an input to int8, or a key to bf16, is a jump: next to a boundary the last bit of a float32 decides. So which
integer, or which bf16, a value became is taken from the engine, after a look whether the float64 value allows it; every
scale, sum and function is computed in float64. Matrix units (AMX) round queries and weights of attention to the type of
the cache, where nobody sees them: what their attention came to is taken from the engine too, after a look how far it is
off. Knows the ops of llamas and of what is built like them.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ingot.compare.ops import MATRIX_UNITS
from ingot.compare.packed import PackedWeights, cut
from ingot.compare.taps import TappedRun
from ingot.dtypes import DType, round_to_bf16
from ingot.engine import Engine
from ingot.fixed_tables import blocks_needed
from ingot.plan import Step
from ingot.plugins.f8_rows import F8Rows
from ingot.plugins.grouped import GroupedRows
from ingot.plugins.op import Array
from ingot.plugins.quantised import QuantisedRows, round_to_int8
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.plugins.unit_rows import UnitRows
from ingot.plugins.weight_rows import WeightRows
from ingot.step_io import TapSession

Float64 = npt.NDArray[np.float64]

# How far attention on matrix units may be off: queries and weights are each rounded by at most half a step of bf16, one
# part in 2^9; and what both add up to.
ATTENDED = 1.5 * 2.0**-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """error: largest difference of a logit, in parts of the largest logit. doubt: how far beyond half a step a value
    lay from the number that it was rounded to, in parts of the largest value of its row. decided: how many values were
    rounded to another number than the float64 one would have been, as a share. attended: largest difference of what
    attention on matrix units came to, in parts of the largest value of its row; 0 where none ran."""

    error: float
    doubt: float
    decided: float
    attended: float


def compare_with_float64(engine: Engine, ids: npt.NDArray[np.int32]) -> Figures:
    """ids [positions] of one sequence, computed as a prompt and then its last token alone."""
    sequences = ids[None, :]
    options = SessionOptions(num_blocks=blocks_needed(engine.plan, sequences=1, length=len(ids)), threads=2)
    session = find_target(engine.manifest.target).open_session(engine.plan, engine.weights, options)
    assert isinstance(session, TapSession)
    try:
        return _PlanFloat64(engine, TappedRun(session, [engine.plan], sequences)).figures()
    finally:
        session.close()


class _PlanFloat64:
    def __init__(self, engine: Engine, run: TappedRun) -> None:
        self._plan, self._section, self._run = engine.plan, engine.weights, run
        self._packed = PackedWeights(engine.plan, engine.weights)
        self._ids = run.batch.ids
        self._values: dict[str, Float64] = {}
        self._stored: dict[str, Array] = {}  # the engine's buffers
        self._kv: tuple[Float64, Float64] | None = None  # of this layer, [positions, kv_heads, head_dim]
        self._doubt, self._rounded, self._other, self._attended = 0.0, 0, 0, 0.0

    def figures(self) -> Figures:
        compute: dict[str, Callable[[Step], tuple[Float64, ...]]] = {
            "embedding": self._embedding,
            "rope_table": self._rope_table,
            "rms_norm": self._rms_norm,
            "matmul": self._matmul,
            "rope_kv_write": self._rope_kv_write,
            "paged_attention": self._paged_attention,
            "gather_rows": lambda step: (self._values[step.inputs[0]],),  # the logits of every row are wanted
        }
        for step, (outputs,) in zip(self._plan.steps, self._run.steps([0]), strict=True):
            results = compute[step.op](step)
            if step.op == "paged_attention" and step.kernel.endswith(MATRIX_UNITS):
                results = (self._stored_choice(results[0], outputs[step.outputs[0]]),)
            self._values.update({name: each for name, each in zip(step.outputs, results, strict=False) if name})
            self._stored.update(outputs)
        logits, stored = self._values[self._plan.logits], self._stored[self._plan.logits]
        assert logits.shape == stored.shape == (len(self._ids), self._plan.vocab_size)
        return Figures(
            error=float(np.abs(logits - stored).max() / np.abs(logits).max()),
            doubt=self._doubt,
            decided=self._other / max(1, self._rounded),
            attended=self._attended,
        )

    def _embedding(self, step: Step) -> tuple[Float64, ...]:
        table = self._packed.weights[step.inputs[0]]
        rows = [_exact(read_weight(self._section, cut(table, int(row), int(row) + 1))) for row in self._ids]
        return (np.concatenate(rows) * float(step.attrs["scale"]),)

    def _rope_table(self, step: Step) -> tuple[Float64, ...]:
        angle = np.arange(len(self._ids))[:, None] * self._vector(step.inputs[0])
        return (np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * float(step.attrs["scale"]),)

    def _rms_norm(self, step: Step) -> tuple[Float64, ...]:
        x, weight, residual = step.inputs
        total = self._values[x] + (self._values[residual] if residual else 0.0)
        return _normed(total, self._vector(weight), float(step.attrs["eps"])), total

    def _matmul(self, step: Step) -> tuple[Float64, ...]:
        _, weight, bias, residual = step.inputs
        given = self._rounded_input(step)
        y = np.empty((len(given), self._packed.weights[weight].shape[0] // (2 if step.attrs["gated"] else 1)))
        for block in self._packed.blocks(weight):
            p = given @ _exact(self._packed.read(block)).T
            if bias:
                p += self._vector(bias)[block.numbers]
            gate, up = np.split(p, 2, axis=1) if step.attrs["gated"] else (p, np.float64(1))
            y[:, block.begin : block.end] = _activated(str(step.attrs["activation"]), gate) * up
        return (y + self._values[residual] if residual else y,)

    def _rounded_input(self, step: Step) -> Float64:
        exact, stored = self._values[step.inputs[0]], self._stored[step.inputs[0]]
        if step.attrs["activations"] == "int8":
            return self._in_int8(exact, round_to_int8(stored)[0])
        if step.attrs["activations"] in ("bf16", "bf16_inputs"):
            return self._in_bf16(exact, round_to_bf16(stored))
        return exact

    def _in_int8(self, exact: Float64, codes: npt.NDArray[np.generic]) -> Float64:
        """The engine's codes of the last axis, times the float64 scale."""
        step = np.abs(exact).max(axis=-1, keepdims=True) / 127
        return self._noted(exact, codes * step, step)

    def _in_bf16(self, exact: Float64, rounded: Array) -> Float64:
        with np.errstate(divide="ignore"):
            step = np.exp2(np.floor(np.log2(np.abs(exact))) - 7)
        return self._noted(exact, rounded.astype(np.float64), step)

    def _noted(self, exact: Float64, rounded: Float64, step: Float64) -> Float64:
        beyond = np.abs(rounded - exact) - 0.5 * step
        self._doubt = max(self._doubt, float((beyond / np.abs(exact).max(axis=-1, keepdims=True)).max()))
        self._rounded += beyond.size
        self._other += int(np.count_nonzero(beyond > 0))
        return rounded

    def _rope_kv_write(self, step: Step) -> tuple[Float64, ...]:
        heads, kv_heads, dim = (int(step.attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
        qkv, cos_sin, q_norm, k_norm = step.inputs[:4]
        parts = self._values[qkv].reshape(len(self._ids), -1, dim)
        q, k, v = np.split(parts, [heads, heads + kv_heads], axis=1)
        eps = float(step.attrs["norm_eps"])
        q = _normed(q, self._vector(q_norm), eps) if q_norm else q
        k = _normed(k, self._vector(k_norm), eps) if k_norm else k
        cos, sin = np.split(self._values[cos_sin][:, None, :], 2, axis=-1)
        assert not step.attrs["interleaved"], "as llamas rotate them"
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        keys, values = self._run.kv(0, int(step.attrs["layer"]))
        self._kv = self._in_cache(k, keys), self._in_cache(v, values)
        return (q.reshape(len(q), -1),)

    def _in_cache(self, exact: Float64, pool: Array) -> Float64:
        """exact [positions, kv_heads, head_dim]; pool [blocks, kv_heads, tokens_per_block, head_dim]"""
        size, positions = self._plan.tokens_per_block, np.arange(len(exact))
        stored = pool[self._run.batch.block_tables[0, 0, positions // size], :, positions % size]
        if self._plan.caches[0].dtype is DType.F32:
            return exact
        if self._plan.caches[0].dtype is DType.BF16:
            return self._in_bf16(exact, stored)
        return self._in_int8(exact, round_to_int8(stored.reshape(-1, stored.shape[-1]))[0].reshape(stored.shape))

    def _paged_attention(self, step: Step) -> tuple[Float64, ...]:
        assert self._kv is not None, "keys are written first"
        assert not step.attrs["window"], "as llamas look"
        heads, kv_heads, dim = (int(step.attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
        q = self._values[step.inputs[0]].reshape(-1, heads, dim)
        keys, values = (np.repeat(each, heads // kv_heads, axis=1) for each in self._kv)
        scores = np.einsum("qhd,khd->hqk", q, keys) * float(step.attrs["scale"])
        scores = np.where(np.tri(len(q), dtype=np.bool_), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return (np.einsum("hqk,khd->qhd", shares, values).reshape(len(q), -1),)

    def _stored_choice(self, exact: Float64, stored: Array) -> Float64:
        off = np.abs(stored - exact).max(axis=-1) / np.abs(exact).max(axis=-1)
        self._attended = max(self._attended, float(off.max()))
        return stored.astype(np.float64)

    def _vector(self, name: str) -> Float64:
        return self._packed.whole(name).astype(np.float64)


def _exact(rows: Array | WeightRows) -> Float64:
    """Weights as what is stored stands for, without a rounding."""
    if isinstance(rows, (GroupedRows, UnitRows, F8Rows)):
        return rows.unscaled.astype(np.float64) * rows.scale[:, None].astype(np.float64)
    if isinstance(rows, QuantisedRows):
        return rows.integers.astype(np.float64) * rows.scale[:, None].astype(np.float64)
    return rows.astype(np.float64)


def _normed(x: Float64, weight: Float64, eps: float) -> Float64:
    return np.asarray(x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight)


def _rotated(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """x [positions, heads, head_dim], all of whose dims rotate, in pairs (i, i + half)."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _activated(name: str, x: Float64) -> Float64:
    assert name in ("none", "silu"), "as llamas have them"
    return x if name == "none" else x / (1 + np.exp(-x))
