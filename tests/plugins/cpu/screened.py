"""Plans of lm_head alone, with a screen, and steps through them."""

import dataclasses

import numpy as np
import numpy.typing as npt

from ingot.plan import Attr, Buffer, Limits, Plan, Rows, Step, Weight
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array
from ingot.plugins.ops.screen import GROUP, dither, half_codes
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.target import SessionOptions
from ingot.step_io import SequenceRules, StepBatch
from tests.plugins.cpu.one_step import NO_KV, Packed, Quantised, batch_of, hold, packed_weight, runnable_isa

PRODUCT: dict[str, Attr] = {"activation": "none", "gated": 0, "activations": "int8"}


def _screen(isa: str) -> tuple[Step, ...]:
    """Product with the codes of four bits, and the choice among its best rows."""
    level = {"amx": "avx512"}.get(isa, isa)
    return (
        Step(
            name="screen",
            op="matmul",
            kernel=f"matmul.w4a8.{isa}",
            inputs=("x", "codes", "", ""),
            outputs=("logits",),
            attrs={**PRODUCT, "group": GROUP},
        ),
        Step(
            name="choice",
            op="screen",
            kernel=f"screen.w8.{level}",
            inputs=("x", "logits", "codes", "dither", "table"),
            outputs=(),
            attrs={"group": GROUP},
        ),
    )


def screened_plan(isa: str, x: Array, head: QuantisedRows, pieces: int = 1) -> tuple[Plan, npt.NDArray[np.uint8]]:
    """Buffers x and logits, the product of both, and its screen; and the weights section."""
    (rows, k), vocab = x.shape, len(head.scale)
    limits = Limits(
        max_batch_size=rows, max_input_len=rows, max_seq_len=rows + 1, max_num_tokens=rows, max_logit_rows=rows
    )
    values: dict[str, Packed] = {
        "full": Quantised.of(head),
        "codes": Quantised.of(half_codes(head)),
        "dither": Packed(values=dither(k)),
        "table": Quantised.of(head, panels=False),
    }
    section, weights = bytearray(), list[Weight]()
    for name, value in values.items():
        section.extend(bytes(-len(section) % 64))
        weights.append(packed_weight(name, value, len(section), pieces))
        section.extend(value.pack(pieces))
    end = -(-rows * k * 4 // 64) * 64
    buffers = (
        Buffer(name="x", rows=Rows.LOGITS, cols=k, offset=0),
        Buffer(name="logits", rows=Rows.LOGITS, cols=vocab, offset=end),
    )
    full = Step(
        name="full",
        op="matmul",
        kernel=f"matmul.w8a8.{isa}",
        inputs=("x", "full", "", ""),
        outputs=("logits",),
        attrs={**PRODUCT, "group": 0},
    )
    plan = Plan(
        vocab_size=vocab,
        max_positions=rows,
        limits=limits,
        caches=(NO_KV,),
        inputs=(),
        buffers=buffers,
        weights=tuple(weights),
        steps=(full,),
        arena_bytes=end + rows * vocab * 4,
        weight_bytes=len(section),
        logits="logits",
        screen=_screen(isa),
    )
    return plan, np.frombuffer(bytes(section), np.uint8)


def open_screened(isa: str, x: Array, head: QuantisedRows, *, threads: int = 1, pieces: int = 1) -> CpuSession:
    """A session with x in place, and greedy sequences that want nothing but their tokens in all slots."""
    plan, section = screened_plan(isa, x, head, pieces)
    session = open_native(
        plan, section, SessionOptions(num_blocks=(len(x),), threads=threads), runnable_isa(plan.screen[1].kernel)
    )
    session.native.write_buffer("x", np.ascontiguousarray(x))
    hold(session, plan.limits.max_batch_size, SequenceRules(log_prob=False))
    return session


def step_of(rows: int, *, want_logits: bool = False) -> StepBatch:
    """A draw from each row: sequences of one token each."""
    batch = batch_of([(0, 1)] * rows, [[row] for row in range(rows)], range(rows), draws=range(rows))
    return dataclasses.replace(batch, ids=np.zeros(rows, np.int32), want_logits=want_logits)
