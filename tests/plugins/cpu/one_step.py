"""Plans of a single step, run by a native session and by the op's reference on the same numbers."""

import dataclasses
import functools
import hashlib
import itertools
import pickle
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ingot.configs.runtime import ISA_BASES
from ingot.dtypes import DType, from_float32, to_float32
from ingot.plan import Attr, Buffer, CacheGroup, Limits, Plan, Rows, Step, Weight, WeightSlice
from ingot.plugins.cpu.kv_layout import pack_keys, pack_values, unpack_keys, unpack_values
from ingot.plugins.cpu.native import kernel_table, offered_isas
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.layouts import (
    ROW,
    ROW_W8,
    interleave_gated,
    num_panels,
    pack_panels,
    pack_quantised,
    pack_table,
    panel_bytes,
    panel_layout,
)
from ingot.plugins.op import Array, Call, KvCache
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import SessionOptions
from ingot.plugins.weight_rows import WeightRows
from ingot.step_inputs import inputs_among
from ingot.step_io import SequenceRules, Session, StepBatch
from tests.plugins.ops.calls import with_arrays

VOCAB = 7
NO_KV = CacheGroup(layers=(0,), kv_heads=1, head_dim=4, tokens_per_block=16, dtype=DType.F32)


def activations_of(kernel: str) -> str:
    """What a product's kernel rounds its input to."""
    return find_target("cpu/amx").activations(kernel)


def runnable_isa(kernel: str) -> str:
    """The level of a session that can run `kernel`; skips the test where this machine lacks it."""
    level = kernel.split(".")[2]
    if level.endswith("emu"):
        if kernel not in kernel_table():
            pytest.skip("ingot was compiled without the emulated kernels")
        return "avx512emu"  # includes every other emulated level
    if level not in offered_isas():
        pytest.skip(f"this machine lacks {level}")
    return level


def draw_kernel(level: str) -> str:
    """What a plan for this level draws with: its own kernel, or that of the nearest level below it."""
    if level in ISA_BASES:
        return next(name for name in find_target(f"cpu/{level}").kernels() if name.startswith("sample."))
    if level.startswith("sm"):
        return "sample.f32.sm80"
    return "sample.f32.avx512emu" if level.endswith("emu") else f"sample.f32.{level}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A weight as input: float32 values of its logical shape; stored as `dtype`; panels for products, and for the
    products of experts, [experts, N, K]."""

    values: Array
    dtype: DType = DType.F32
    panels: bool = False
    gated: bool = False
    group: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def rounded(self) -> Array | WeightRows:
        """The values that the stored bits stand for."""
        return to_float32(from_float32(self.values, self.dtype.numbers), self.dtype.numbers)

    def cuts(self, pieces: int) -> list[int]:
        """Where the panels (of each expert) are cut."""
        count, pair = num_panels(self.shape[-2], gated=self.gated), 2 if self.gated else 1
        return sorted({count // pair * i // pieces * pair for i in range(pieces + 1)})

    def pack(self, pieces: int = 1) -> bytes:
        """As stored; of panels: pieces, in them one matrix after the other."""
        if not self.panels:
            return self._table()
        matrices = self._matrices
        return b"".join(each[a:b].tobytes() for a, b in itertools.pairwise(self.cuts(pieces)) for each in matrices)

    def _table(self) -> bytes:
        return from_float32(self.values, self.dtype).tobytes()

    @functools.cached_property
    def _matrices(self) -> Sequence[npt.NDArray[np.generic]]:
        """Panels of each matrix, made once for all sessions: from then on the values stay as they are."""
        self.values.flags.writeable = False
        stored = from_float32(self.values, self.dtype.numbers)
        matrices = stored.reshape(-1, *stored.shape[-2:])
        return [pack_panels(interleave_gated(each) if self.gated else each, self.dtype) for each in matrices]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised(Packed):
    """A quantised weight: panels for products, else a w8 table."""

    values: Array = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float32))
    rows: WeightRows

    @classmethod
    def of(cls, rows: WeightRows, *, panels: bool = True, gated: bool = False) -> "Quantised":
        return cls(rows=rows, dtype=DType(rows.format.dtype), panels=panels, gated=gated, group=rows.group)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    @property
    def rounded(self) -> WeightRows:
        return self.rows

    def _table(self) -> bytes:
        assert isinstance(self.rows, QuantisedRows), "tables are w8"
        return pack_table(self.rows).tobytes()

    @functools.cached_property
    def _matrices(self) -> Sequence[npt.NDArray[np.generic]]:
        for field in dataclasses.fields(self.rows):
            if isinstance(part := getattr(self.rows, field.name), np.ndarray):
                part.flags.writeable = False
        experts = [self.rows.take(each) for each in range(self.shape[0])] if len(self.shape) == 3 else [self.rows]
        return [pack_quantised(each, gated=self.gated) for each in experts]


Input = Array | Packed | None


def hold(session: Session, count: int, rules: SequenceRules | None = None) -> None:
    """Sequences in the first slots, of one token each; greedy ones unless rules are given."""
    for slot in range(count):
        session.start(slot, rules or SequenceRules(), np.zeros(1, np.int32), 1)


def batch_of(
    lengths: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    logit_rows: Sequence[int] = (),
    *,
    draws: Sequence[int] = (),
    want_logits: bool = False,
    ids: npt.NDArray[np.int32] | None = None,
) -> StepBatch:
    """lengths: (past, new) tokens per sequence; tables: blocks per sequence. Sequence s is in slot s."""
    new = [each[1] for each in lengths]
    width = max(len(table) for table in tables)
    return StepBatch(
        ids=np.arange(sum(new), dtype=np.int32) % VOCAB if ids is None else ids,
        query_starts=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        past_lengths=np.array([each[0] for each in lengths], dtype=np.int32),
        block_tables=np.array([[[*table, *[-1] * (width - len(table))] for table in tables]], dtype=np.int32),
        logit_rows=np.array(logit_rows, dtype=np.int32),
        slots=np.arange(len(lengths), dtype=np.int32),
        draws=np.array(draws, dtype=np.int32),
        want_logits=want_logits,
    )


def in_groups(batch: StepBatch, plan: Plan) -> StepBatch:
    """The same block tables in every cache group of a plan."""
    return dataclasses.replace(batch, block_tables=np.repeat(batch.block_tables, len(plan.caches), axis=0))


def plain_batch(tokens: int, logit_rows: Sequence[int] = ()) -> StepBatch:
    """One sequence of `tokens` new tokens."""
    return batch_of([(0, tokens)], [range(-(-tokens // NO_KV.tokens_per_block))], logit_rows)


def one_step_plan(
    kernel: str,
    inputs: Sequence[Input],
    attrs: Mapping[str, Attr],
    batch: StepBatch,
    kv: CacheGroup = NO_KV,
    *,
    pieces: int = 1,
    gives_logits: bool = False,
) -> tuple[Plan, npt.NDArray[np.uint8]]:
    """The plan (buffers in0, in1, ..., out0, ...) and its weights section. Each weight is cut into `pieces`.

    gives_logits: out0 holds the logits, else a buffer that nothing writes.
    """
    op = find_op(kernel.split(".")[0])
    tokens, positions = len(batch.ids), int((batch.past_lengths + np.diff(batch.query_starts)).max())
    limits = Limits(
        max_batch_size=len(batch.past_lengths),
        max_input_len=positions,
        max_seq_len=positions + 1,
        max_num_tokens=tokens,
        max_logit_rows=max(1, len(batch.logit_rows)),
    )
    section, weights, buffers, names = bytearray(), [], [], []
    end = 0

    def add_buffer(name: str, rows: Rows, cols: int) -> str:
        nonlocal end
        dtype = DType.I32 if op.lists and name.startswith("out") else DType.F32
        buffers.append(Buffer(name=name, rows=rows, cols=cols, offset=end, dtype=dtype))
        end += -(-(tokens if rows is Rows.TOKENS else limits.max_logit_rows) * cols * 4 // 64) * 64
        return name

    for index, value in enumerate(inputs):
        if isinstance(value, Packed):
            section.extend(bytes(-len(section) % 64))
            weights.append(packed_weight(f"in{index}", value, len(section), pieces))
            section.extend(value.pack(pieces))
        elif value is not None:
            add_buffer(f"in{index}", Rows.TOKENS, value.shape[1])
        names.append("" if value is None else f"in{index}")
    cols = [None if value is None else _cols(value) for value in inputs]
    if op.name == "embedding":
        cols[0] = inputs[0].shape[1]  # type: ignore[union-attr]
    outputs = [
        add_buffer(f"out{index}", op.rows or Rows.TOKENS, count) for index, count in enumerate(op.out_cols(cols, attrs))
    ]
    logits = outputs[0] if gives_logits else add_buffer("logits", Rows.LOGITS, VOCAB)
    read = op.with_batch(names)
    step = Step(name="step", op=op.name, kernel=kernel, inputs=read, outputs=tuple(outputs), attrs=attrs)
    plan = Plan(
        vocab_size=buffers[-1].cols,
        max_positions=positions,
        limits=limits,
        caches=(kv,),
        inputs=inputs_among(read),
        buffers=tuple(buffers),
        weights=tuple(weights),
        steps=(step,),
        arena_bytes=end,
        weight_bytes=len(section),
        logits=logits,
        draw_kernel=draw_kernel(kernel.split(".")[2]),
    )
    assert op.problem(step.inputs, attrs) is None, op.problem(step.inputs, attrs)
    return plan, np.frombuffer(bytes(section) or bytes(64), dtype=np.uint8)


def _cols(value: Array | Packed) -> int:
    """Columns of an activation; rows of a product's weight, length of a vector."""
    if not isinstance(value, Packed):
        return int(value.shape[1])
    return int(value.shape[-2] if value.panels or len(value.shape) == 3 else value.shape[0])


def packed_weight(name: str, value: Packed, offset: int, pieces: int) -> Weight:
    shape, data = value.shape, len(value.pack(pieces))
    if not value.panels:
        whole = WeightSlice(begin=0, end=shape[-2 if len(shape) > 2 else 0], offset=offset)
        layout = ROW_W8 if value.dtype is DType.W8 else ROW
        return Weight(name=name, dtype=value.dtype, shape=shape, layout=layout, nbytes=data, pieces=(whole,))
    unit = panel_bytes(shape[-1], value.dtype, value.group) * (shape[0] if len(shape) == 3 else 1)
    parts = tuple(
        WeightSlice(begin=a, end=b, offset=offset + a * unit) for a, b in itertools.pairwise(value.cuts(pieces))
    )
    layout = panel_layout(value.dtype, value.group) + (".gated" if value.gated else "")
    return Weight(name=name, dtype=value.dtype, shape=shape, layout=layout, nbytes=data, pieces=parts)


def open_step(
    kernel: str,
    inputs: Sequence[Input],
    attrs: Mapping[str, Attr],
    batch: StepBatch,
    *,
    cache: KvCache | None = None,
    threads: int = 1,
    pieces: int = 1,
    tactics: str | None = None,
) -> CpuSession:
    """A session with the inputs in place, the cache's slots copied in, and a greedy sequence in every slot."""
    plan, section = one_step_plan(kernel, inputs, attrs, batch, cache.group if cache else NO_KV, pieces=pieces)
    if tactics is not None:
        plan = dataclasses.replace(plan, tactics={"step": tactics})
    num_blocks = cache.keys.shape[1] if cache else max(1, int(batch.block_tables.max()) + 1)
    session = open_native(
        plan, section, SessionOptions(num_blocks=(num_blocks,), threads=threads), runnable_isa(kernel)
    )
    for index, value in enumerate(inputs):
        if value is not None and not isinstance(value, Packed):
            session.native.write_buffer(f"in{index}", np.ascontiguousarray(value, dtype=np.float32))
    if cache:
        load_cache(session, cache)
    hold(session, plan.limits.max_batch_size)
    return session


def native_outputs(session: CpuSession, batch: StepBatch) -> list[Array]:
    """Run once; the outputs of the only step."""
    _, outputs = session.run_tapped(batch, ["step"])
    return [outputs["step"][name] for name in sorted(outputs["step"])]


def reference_outputs(
    kernel: str, inputs: Sequence[Input], attrs: Mapping[str, Attr], batch: StepBatch, cache: KvCache | None = None
) -> tuple[Array, ...]:
    """What the op's specification says; a write to the cache happens in `cache`.

    Without one, the latest results are kept: the kernels of one op for several levels are compared with the same.
    """
    op = find_op(kernel.split(".")[0])
    values = [value.rounded if isinstance(value, Packed) else value for value in inputs]
    given = with_arrays(op, values, batch)
    if cache is not None:
        return op.reference(Call(inputs=given, attrs=attrs, batch=batch, kv=[cache]))
    key = hashlib.sha256(pickle.dumps((op.name, values, dict(attrs), batch))).digest()
    if key not in _REFERENCES:
        found = op.reference(Call(inputs=given, attrs=attrs, batch=batch, kv=[KvCache(NO_KV, 64)]))
        for each in found:
            each.flags.writeable = False
        if len(_REFERENCES) == KEPT_REFERENCES:
            del _REFERENCES[next(iter(_REFERENCES))]
        _REFERENCES[key] = found
    return _REFERENCES[key]


KEPT_REFERENCES = 300
_REFERENCES: dict[bytes, tuple[Array, ...]] = {}


def load_cache(session: CpuSession, cache: KvCache) -> None:
    """Copy every slot in the pool's layout; padding dims of values hold NaN or code 85, which nothing may show."""
    layout = cache.group
    padding = ((0, 0), (0, 0), (0, layout.padded_dim - layout.head_dim))
    for layer in layout.layers:
        for block in range(cache.keys.shape[1]):
            values = np.pad(cache.values[layer, block], padding, constant_values=np.nan)
            keys, values = (_codes(each, layout) for each in (cache.keys[layer, block], values))
            session.native.write_kv(layer, block, False, pack_keys(keys, cache.key_scales[layer, block], layout))
            session.native.write_kv(layer, block, True, pack_values(values, cache.value_scales[layer, block], layout))


def _codes(numbers: Array, layout: CacheGroup) -> Array:
    """No code of int8 is NaN."""
    return np.where(np.isnan(numbers), np.float32(85), numbers) if layout.dtype is DType.I8 else numbers


def are_neighbours(found: Array, codes: Array, dtype: DType) -> None:
    """Of codes of a KV cache, the same or next ones: a number between two may become either."""
    relative, step = {DType.I8: (0.0, 1.0), DType.F8: (2.0**-3, 2.0**-9)}[dtype]
    np.testing.assert_allclose(found, codes, rtol=1.001 * relative, atol=1.001 * step)


def read_cache(session: CpuSession, layout: CacheGroup, layer: int, block: int) -> tuple[Array, Array]:
    """Keys and values of a block, each [kv_heads, tokens_per_block, ...]; values with their padding dims."""
    keys, key_scales = unpack_keys(session.native.read_kv(layer, block, False), layout)
    values, value_scales = unpack_values(session.native.read_kv(layer, block, True), layout)
    return keys * key_scales[..., None], values * value_scales[..., None]
