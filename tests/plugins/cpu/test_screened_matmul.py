"""Products that may leave out all logits but the best: the kernels against the op, whatever the weights, the rows and
the threads are."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from ingot.errors import EngineError
from ingot.plan import Buffer, Limits, Plan, Rows, Step, Weight
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array
from ingot.plugins.ops.screened_matmul import MOST_ROWS, dither, half_codes, screened
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.target import SessionOptions
from ingot.plugins.weight_values import product
from ingot.step_inputs import inputs_among
from ingot.step_io import NO_LOG_PROB, Ending, KnownTokens, SequenceRules, StepBatch
from tests.plugins.cpu.one_step import (
    NO_KV,
    Packed,
    Quantised,
    batch_of,
    draw_kernel,
    hold,
    packed_weight,
    runnable_isa,
)
from tests.plugins.ops.screened import CASES, head_of, rows_of

pytestmark = pytest.mark.native

ISAS = sorted(name.rsplit(".", 1)[1] for name in kernel_table() if name.startswith("screened_matmul.w8a8."))
USUAL = SequenceRules(log_prob=False)  # greedy, and nothing but the token


def plan_of(isa: str, x: Array, head: QuantisedRows, pieces: int = 1) -> tuple[Plan, npt.NDArray[np.uint8]]:
    """Buffers x and logits, and the step from one to the other; and the weights section."""
    (rows, k), vocab = x.shape, len(head.scale)
    limits = Limits(
        max_batch_size=rows, max_input_len=rows, max_seq_len=rows + 1, max_num_tokens=rows, max_logit_rows=rows
    )
    values: dict[str, Packed] = {
        "head": Quantised.of(head),
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
    step = Step(
        name="head",
        op="screened_matmul",
        kernel=f"screened_matmul.w8a8.{isa}",
        inputs=("x", *values, "whole_rows"),
        outputs=("logits",),
        attrs={"activations": "int8", "group": 0, "product": f"matmul.w8a8.{isa}", "estimate": f"matmul.w4a8.{isa}"},
    )
    plan = Plan(
        vocab_size=vocab,
        max_positions=rows,
        limits=limits,
        caches=(NO_KV,),
        inputs=inputs_among({"whole_rows"}),
        buffers=(
            Buffer(name="x", rows=Rows.LOGITS, cols=k, offset=0),
            Buffer(name="logits", rows=Rows.LOGITS, cols=vocab, offset=end),
        ),
        weights=tuple(weights),
        steps=(step,),
        arena_bytes=end + rows * vocab * 4,
        weight_bytes=len(section),
        logits="logits",
        draw_kernel=draw_kernel(isa),
    )
    return plan, np.frombuffer(bytes(section), np.uint8)


def open_head(isa: str, x: Array, head: QuantisedRows, *, threads: int = 1, pieces: int = 1) -> CpuSession:
    """A session with x in place, and sequences in all slots."""
    plan, section = plan_of(isa, x, head, pieces)
    options = SessionOptions(num_blocks=(len(x),), threads=threads)
    session = open_native(plan, section, options, runnable_isa(plan.steps[0].kernel))
    session.native.write_buffer("x", np.ascontiguousarray(x))
    hold(session, len(x), USUAL)
    return session


def step_of(rows: int, *, want_logits: bool = False) -> StepBatch:
    """A draw from each row: sequences of one token each."""
    batch = batch_of([(0, 1)] * rows, [[row] for row in range(rows)], range(rows), draws=range(rows))
    return dataclasses.replace(batch, ids=np.zeros(rows, np.int32), want_logits=want_logits)


def left(session: CpuSession, rows: int) -> Array:
    """The logits that the last step left."""
    found: Array = session.native.read_buffer("logits", rows)
    return found


@pytest.mark.daily(21)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES)
def test_logits_that_are_left_are_those_of_the_op(isa: str, case: str) -> None:
    """And the token is that of all logits."""
    for index, k in enumerate((1, 17, 64, 300)):
        x, head = CASES[case](k)
        rows = len(x)
        session = open_head(isa, x, head, threads=(1, 2, 5)[index % 3], pieces=1 + index % 2)
        full = session.run(step_of(rows, want_logits=True))
        assert full.logits is not None
        assert full.logits.tobytes() == product(x, head, "int8").tobytes()
        best = session.run(step_of(rows))
        assert best.ids.tolist() == full.ids.tolist() == [full.logits.argmax(axis=1).tolist()]
        assert (best.log_probs == NO_LOG_PROB).all()
        assert left(session, rows).tobytes() == screened(x, head).tobytes()
        session.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [8, 15, 16, 17, 40, 257])
def test_small_vocabularies_and_many_threads(isa: str, vocab: int) -> None:
    x, head = rows_of(3, 65), head_of(vocab, 65)
    head.scale[vocab // 2] *= np.float32(50)  # far ahead, or far behind
    session = open_head(isa, x, head, threads=5)
    assert session.run(step_of(3)).ids[0].tolist() == product(x, head, "int8").argmax(axis=1).tolist()
    assert left(session, 3).tobytes() == screened(x, head).tobytes()
    session.close()


@pytest.mark.daily(1)
@pytest.mark.parametrize("isa", ISAS)
def test_long_rows(isa: str) -> None:
    x, head = rows_of(2, 20000), head_of(300, 20000)
    session = open_head(isa, x, head, threads=2)
    assert session.run(step_of(2)).ids[0].tolist() == product(x, head, "int8").argmax(axis=1).tolist()
    assert np.isneginf(left(session, 2)).any(axis=1).all()
    session.close()


def test_logits_that_are_no_numbers_are_told_as_ever() -> None:
    x, head = rows_of(2, 64), head_of(1000, 64)
    x[1, 3] = np.nan
    session = open_head("avx2", x, head, threads=2)
    found = session.run(step_of(2))
    assert np.isnan(found.log_probs).tolist() == [[False, True]]
    assert found.log_probs[0, 0] == NO_LOG_PROB
    assert found.ends.tolist() == [Ending.NONE, Ending.FAILED]
    session.close()


def test_sequences_that_want_more_get_all_logits() -> None:
    x, head = rows_of(MOST_ROWS + 1, 64), head_of(1000, 64)
    full = product(x, head, "int8")
    session = open_head("avx2", x, head)
    hold(session, 1, SequenceRules())
    alone = session.run(step_of(1))
    assert alone.log_probs[0, 0] < 0
    assert session.run(step_of(2)).log_probs.tolist() == [[alone.log_probs[0, 0], NO_LOG_PROB]]
    assert left(session, 2).tobytes() == full[:2].tobytes()
    for more in ({"temperature": 0.5}, {"top": 0}, {"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 1.1}):
        hold(session, 1, dataclasses.replace(USUAL, **more))
        assert session.run(step_of(1)).log_probs[0, 0] == NO_LOG_PROB
        assert left(session, 1).tobytes() == full[:1].tobytes()
    hold(session, 1, USUAL)
    nothing = np.zeros(1, np.int32)
    known = KnownTokens(row=nothing, token=nothing, top=nothing)
    both = session.run(dataclasses.replace(step_of(1), known=known))
    assert both.log_probs[0, 0] == NO_LOG_PROB
    assert both.log_probs[0, 1] < 0
    assert left(session, 1).tobytes() == full[:1].tobytes()
    tapped, outputs = session.run_tapped(step_of(1), ["head"])
    assert outputs["head"]["logits"].tobytes() == full[:1].tobytes()
    assert tapped.ids.tolist() == alone.ids.tolist()
    for rows in (MOST_ROWS + 1, MOST_ROWS):
        session.run(step_of(rows))
        assert left(session, rows).tobytes() == screened(x[:rows], head).tobytes()
    assert np.isneginf(left(session, MOST_ROWS)).any()
    session.close()


def test_a_step_that_does_not_fit_is_refused() -> None:
    x, head = rows_of(1, 64), head_of(100, 64)
    plan, section = plan_of("avx2", x, head)
    (step,) = plan.steps

    def reading(*inputs: str) -> Step:
        return dataclasses.replace(step, inputs=inputs)

    def calling(**kernels: str) -> Step:
        return dataclasses.replace(step, attrs={**step.attrs, **kernels})

    wrong = {
        "6 inputs": reading("x", "head", "codes", "dither", "table"),
        "weight head must hold a row of w4 codes": reading("x", "head", "head", "dither", "table", "whole_rows"),
        "weight codes must be w8": reading("x", "head", "codes", "dither", "codes", "whole_rows"),
        "weight codes must be \\[N, K\\]|does not take w4": reading(
            "x", "codes", "codes", "dither", "table", "whole_rows"
        ),
        "there is no weight ": reading("x", "head", "codes", "", "table", "whole_rows"),
        "must have 64 columns": reading("logits", "head", "codes", "dither", "table", "whole_rows"),
        "must be whole_rows": reading("x", "head", "codes", "dither", "table", "logit_rows"),
        "no kernel matmul.w8a8.none": calling(product="matmul.w8a8.none"),
        "does not multiply w8": calling(product="matmul.w4a8.avx2"),
        "does not multiply w4": calling(estimate="matmul.w8a8.avx2"),
        "needs avx512": calling(estimate="matmul.w4a8.avx512"),
    }
    for word, broken in wrong.items():
        with pytest.raises(EngineError, match=word):
            open_native(
                dataclasses.replace(plan, steps=(broken,)), section, SessionOptions(num_blocks=(1,), threads=1), "avx2"
            )
