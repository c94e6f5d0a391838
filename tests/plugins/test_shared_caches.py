"""Layers that share another layer's cache: attention that reads what an earlier layer has written, and writes nothing.

first layer    qkv ▶ rope_kv_write (0) ▶ attention (0)
second layer   q ▶ attention (0), or, to compare with, ▶ attention (1) of a copy that the first layer's qkv fills
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ingot.builder.schedule import schedule, schedule_calls
from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Attr, Buffer, CacheGroup, Limits, Plan, Rows, Step, Weight
from ingot.plan_check import check_plan
from ingot.plan_json import plan_from_json
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cpu.session import open_native
from ingot.plugins.plan_work import PlanWork
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_op, find_target, op_names
from ingot.plugins.target import CallRules, SessionOptions
from ingot.step_inputs import inputs_among
from ingot.step_io import Session, StepBatch
from ingot.step_work import Load
from tests.plugins.cpu.one_step import VOCAB, Packed, batch_of, packed_weight

native = pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")

HEADS, KV_HEADS, DIM, HIDDEN, BLOCKS = 4, 2, 8, 32, 6
COLS = {"x": HIDDEN, "qkv": (HEADS + 2 * KV_HEADS) * DIM, "q": HEADS * DIM, "more": HEADS * DIM, "unread": HEADS * DIM}
COLS |= {"a": HEADS * DIM, "y": HIDDEN, "q2": HEADS * DIM, "b": HEADS * DIM, "z": HIDDEN}
SHAPES = {"table": (VOCAB, HIDDEN), "qkv.weight": (COLS["qkv"], HIDDEN), "out.weight": (HIDDEN, HEADS * DIM)}
SHAPES |= {"q2.weight": (HEADS * DIM, HIDDEN), "out2.weight": (HIDDEN, HEADS * DIM), "head.weight": (VOCAB, HIDDEN)}
SIZES: Mapping[str, Attr] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}


def _step(name: str, op: str, inputs: Sequence[str], output: str, **attrs: Attr) -> Step:
    """Attributes that are not given have the op's defaults."""
    found = find_op(op)
    default = {key: value for key, value in found.attrs.items() if not isinstance(value, type)}
    given = found.with_batch([*inputs, *[""] * (len(found.inputs) - len(found.batch_inputs) - len(inputs))])
    kernel = f"{op}.f32.avx2"
    return Step(name=name, op=op, kernel=kernel, inputs=given, outputs=(output,), attrs={**default, **attrs})


def _steps(layer: int, window: int) -> list[Step]:
    """layer: whose keys and values the second attention reads; one that nobody else writes gets the first one's."""
    attention: dict[str, Attr] = {**SIZES, "scale": 0.3, "window": window}
    copied = [_step("copy", "rope_kv_write", ["qkv"], "unread", layer=layer, **SIZES)] if layer else []
    return [
        _step("embed", "embedding", ["table"], "x"),
        _step("qkv", "matmul", ["x", "qkv.weight"], "qkv"),
        _step("write", "rope_kv_write", ["qkv"], "q", layer=0, **SIZES),
        *copied,
        _step("attention", "paged_attention", ["q"], "a", layer=0, **attention),
        _step("out", "matmul", ["a", "out.weight", "", "x"], "y"),
        _step("q2", "matmul", ["y", "q2.weight"], "q2"),
        _step("attention2", "paged_attention", ["q2"], "b", layer=layer, **attention),
        _step("out2", "matmul", ["b", "out2.weight", "", "y"], "z"),
        _step("gather", "gather_rows", ["z"], "last"),
        _step("head", "matmul", ["last", "head.weight"], "logits"),
    ]


def _plan(layer: int, *, panels: bool, window: int = 0) -> tuple[Plan, npt.NDArray[np.uint8]]:
    """With a cache of one layer, or of two; and the weights."""
    draw, section, weights = np.random.default_rng(0), bytearray(), list[Weight]()
    for name, shape in SHAPES.items():
        packed = Packed(
            values=draw.standard_normal(shape).astype(np.float32) / np.float32(4), panels=panels and name != "table"
        )
        weights.append(packed_weight(name, packed, len(section), 1))
        section.extend(packed.pack())
        section.extend(bytes(-len(section) % 64))
    limits = Limits(max_batch_size=2, max_input_len=40, max_seq_len=81, max_num_tokens=48, max_logit_rows=48)
    steps = tuple(_steps(layer, window))
    buffers, end = list[Buffer](), 0
    rows = dict.fromkeys(COLS, Rows.TOKENS) | {"last": Rows.LOGITS, "logits": Rows.LOGITS}
    for name, cols in {**COLS, "last": HIDDEN, "logits": VOCAB}.items():
        buffers.append(Buffer(name=name, rows=rows[name], cols=cols, offset=end))
        end += -(-limits.max_num_tokens * cols * 4 // 64) * 64
    layers = (0, 1) if layer else (0,)
    cache = CacheGroup(
        window=window, layers=layers, kv_heads=KV_HEADS, head_dim=DIM, tokens_per_block=16, dtype=DType.F32
    )
    plan = Plan(
        vocab_size=VOCAB,
        max_positions=80,
        limits=limits,
        caches=(cache,),
        inputs=inputs_among({name for step in steps for name in step.inputs}),
        buffers=tuple(buffers),
        weights=tuple(weights),
        steps=steps,
        arena_bytes=end,
        weight_bytes=len(section),
        logits="logits",
        draw_kernel="sample.f32.avx2",
    )
    check_plan(plan)
    assert plan_from_json(plan.to_json()) == plan
    return plan, np.frombuffer(bytes(section), np.uint8)


def _batches() -> list[StepBatch]:
    """Two prompts, one in two chunks; then tokens of both."""
    tables = [[3, 0, 5], [1, 4, 2]]
    every = [[(0, 30), (0, 17)], [(30, 9), (17, 1)], [(39, 1), (18, 1)], [(40, 1), (19, 1)]]
    return [batch_of(lengths, tables, range(sum(n for _, n in lengths)), want_logits=True) for lengths in every]


def _logits(session: Session) -> list[npt.NDArray[np.float32]]:
    found = []
    for batch in _batches():
        result = session.run(batch)
        assert result.logits is not None
        found.append(result.logits)
    session.close()
    return found


def _of_ref(plan: Plan, section: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.float32]]:
    return _logits(RefSession(plan, section, SessionOptions(num_blocks=(BLOCKS,))))


@pytest.mark.parametrize("window", [0, 20])
def test_ref_gives_what_a_copy_of_the_cache_gives(window: int) -> None:
    shared, copied = (_of_ref(*_plan(layer, panels=False, window=window)) for layer in (0, 1))
    for one, other in zip(shared, copied, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


@native
@pytest.mark.native
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_cpu_sessions_do_so_too(threads: int, window: int) -> None:
    """With the variants that they run in service, and step by step."""
    found = []
    for layer in (0, 1):
        plan, section = _plan(layer, panels=True, window=window)
        for each in (plan, schedule(plan, find_target("cpu/avx2"))):
            session = open_native(each, section, SessionOptions(num_blocks=(BLOCKS,), threads=threads), "avx2")
            found.append(_logits(session))
            assert bool(each.variants) == (each is not plan)
    expected = _of_ref(*_plan(0, panels=False, window=window))
    for other in found:
        for one, another, wanted in zip(found[0], other, expected, strict=True):
            np.testing.assert_array_equal(one, another)
            np.testing.assert_allclose(one, wanted, rtol=2e-5, atol=2e-5)


def test_a_shared_cache_takes_no_memory() -> None:
    shared, copied = (_plan(layer, panels=False)[0] for layer in (0, 1))
    assert (shared.num_layers, copied.num_layers) == (1, 2)
    assert copied.block_bytes == 2 * shared.block_bytes
    load, last = Load(sequences=[(40, 1)], logit_rows=1), "attention2"
    works = [
        PlanWork(plan).of(next(step for step in plan.steps if step.name == last), load) for plan in (shared, copied)
    ]
    assert works[0] == works[1], "the second layer reads as much, from the first one's cache"


def _without_a_write(plan: Plan) -> Plan:
    """The queries come from elsewhere."""
    steps = [step for step in plan.steps if step.name != "write"]
    query = dataclasses.replace(
        next(step for step in steps if step.name == "q2"), name="q", inputs=("x", "q2.weight", "", "")
    )
    steps.insert(2, dataclasses.replace(query, outputs=("q",)))
    given = inputs_among({name for step in steps for name in step.inputs})
    return dataclasses.replace(plan, steps=tuple(steps), inputs=given)


def test_a_cache_that_nobody_has_written_is_refused() -> None:
    plan, _ = _plan(0, panels=False)
    with pytest.raises(EngineError, match="keys and values no earlier kernel call has written"):
        check_plan(_without_a_write(plan))


@native
@pytest.mark.native
def test_threads_wait_for_keys_and_values_that_another_step_writes() -> None:
    """An attention that shares a cache reads no buffer that the write before it has written."""
    plan, section = _plan(0, panels=True)
    early = [step for step in plan.steps if step.name not in ("attention2", "q2")]
    second = [dataclasses.replace(step, inputs=("x", *step.inputs[1:])) for step in plan.steps if step.name == "q2"]
    attention = [step for step in plan.steps if step.name == "attention2"]
    at = next(i for i, step in enumerate(early) if step.name == "write")
    plan = dataclasses.replace(plan, steps=(*early[:at], *second, early[at], *attention, *early[at + 1 :]))
    check_plan(plan)
    ready = schedule(plan, find_target("cpu/avx2"))
    for variant in ready.variants:
        calls = {call.step: call for call in variant.calls}
        assert calls["write"].waits, variant.name
    alone = CallRules(norming=frozenset(), by_rows=frozenset(op_names()), private_elements=1)
    variant = schedule_calls(plan, alone).variants[-1]
    assert {call.step: call for call in variant.calls}["write"].waits, "whatever else the two calls share"
    variant = ready.variants[0]
    hasty = [dataclasses.replace(call, waits=call.waits and call.step != "write") for call in variant.calls]
    broken = dataclasses.replace(
        ready, variants=(dataclasses.replace(variant, calls=tuple(hasty)), *ready.variants[1:])
    )
    with pytest.raises(EngineError, match="no barrier lies between"):
        open_native(broken, section, SessionOptions(num_blocks=(BLOCKS,), threads=1), "avx2")
