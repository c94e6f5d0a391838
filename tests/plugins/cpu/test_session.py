"""The native session: hostile plans and batches refused, hooks, interruption, threads, memory."""

import dataclasses
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import CapacityError, EngineError, RequestError, UsageError
from ingot.plan import Attr, Plan
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.target import SessionOptions
from ingot.step_io import KnownTokens, StepBatch
from tests.plugins.cpu.one_step import Packed, batch_of, one_step_plan, open_step, plain_batch

pytestmark = pytest.mark.native

OPTIONS = SessionOptions(num_blocks=(8,), threads=1)


def _norm_plan() -> tuple[Plan, Any]:
    x, weight = np.ones((4, 20), np.float32), Packed(values=np.ones(20, np.float32))
    return one_step_plan("rms_norm.f32.avx2", [x, weight, x], {"eps": 1e-5}, plain_batch(4))


def _matmul_plan() -> tuple[Plan, Any]:
    weight = Packed(values=np.ones((40, 20), np.float32), dtype=DType.BF16, panels=True, gated=True)
    attrs: dict[str, Attr] = {"activation": "silu", "gated": 1, "activations": "f32", "group": 0}
    return one_step_plan("matmul.bf16.avx2", [np.ones((4, 20), np.float32), weight, None, None], attrs, plain_batch(4))


def _attention_plan() -> tuple[Plan, Any]:
    attrs: dict[str, Attr] = {"layer": 0, "heads": 2, "kv_heads": 1, "head_dim": 4, "scale": 0.5}
    attrs |= {"window": 0, "softcap": 0.0, "bf16_bias": 0, "growth": 0.0, "growth_every": 1}
    return one_step_plan("paged_attention.f32.avx2", [np.ones((4, 8), np.float32)], attrs, plain_batch(4))


def _step(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, steps=(dataclasses.replace(plan.steps[0], **changes),))


def _attrs(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: _step(attrs={**plan.steps[0].attrs, **changes})(plan)


def _weight(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, weights=(dataclasses.replace(plan.weights[0], **changes),))


def _piece(**changes: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        return _weight(pieces=(dataclasses.replace(plan.weights[0].pieces[0], **changes),))(plan)

    return change


def _buffer(index: int, **changes: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        buffers = list(plan.buffers)
        buffers[index] = dataclasses.replace(buffers[index], **changes)
        return dataclasses.replace(plan, buffers=tuple(buffers))

    return change


def _kv(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, caches=(dataclasses.replace(plan.caches[0], **changes),))


def _limits(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, **changes))


def _plan(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, **changes)


HOSTILE = [
    (_norm_plan, _step(kernel="rms_norm.f32.vax"), "no kernel"),
    (_norm_plan, _step(kernel="layer_norm.f32.avx2"), "does not compute op"),
    (_norm_plan, _step(op="sample", kernel="sample.f32.avx2"), "cannot compute op sample"),
    (_norm_plan, _step(inputs=("in0", "in1")), "takes 3 inputs, has 2"),
    (_norm_plan, _step(inputs=("in0", "", "")), "weight is missing"),
    (_norm_plan, _step(inputs=("in0", "in0", "")), "no weight in0"),
    (_norm_plan, _step(inputs=("in1", "in1", "")), "no buffer in1"),
    (_norm_plan, _step(outputs=("out0",)), "gives 2 outputs"),
    (_norm_plan, _step(outputs=("out0", "logits")), "columns"),
    (_norm_plan, _step(outputs=("out0", "out0")), "overlap"),
    (_norm_plan, _step(attrs={}), "takes 1 attributes"),
    (_norm_plan, _step(attrs={"epsilon": 1.0}), "eps is missing"),
    (_norm_plan, _attrs(eps="small"), "must be a number"),
    (_norm_plan, _attrs(eps=float("nan")), "must be a number"),
    (_norm_plan, _weight(dtype=DType.BF16), "its rows have 40"),
    (_norm_plan, _weight(dtype=DType.BF16, nbytes=40), "must be f32"),
    (_norm_plan, _weight(nbytes=81), "says that it has 81 bytes"),
    (_norm_plan, _weight(shape=(19,)), "rows|have 20"),
    (_norm_plan, _weight(shape=()), "shape"),
    (_norm_plan, _piece(offset=-64), "outside"),
    (_norm_plan, _piece(offset=1 << 40), "outside"),
    (_norm_plan, _piece(offset=32), "outside"),
    (_norm_plan, _buffer(0, offset=-64), "outside"),
    (_norm_plan, _buffer(0, offset=1 << 62), "outside"),
    (_norm_plan, _buffer(0, offset=4), "outside"),
    (_norm_plan, _buffer(0, cols=1 << 30), "outside"),
    (_norm_plan, _buffer(0, cols=0), "range"),
    (_norm_plan, _buffer(2, offset=64), "overlap"),
    (_norm_plan, _buffer(0, dtype=DType.BF16), "buffer in0: is bf16, CPU kernels store f32 alone"),
    (_norm_plan, _plan(arena_bytes=64), "outside"),
    (_norm_plan, _plan(arena_bytes=-1), "negative"),
    (_norm_plan, _plan(logits="in0"), "logits"),
    (_norm_plan, _plan(steps=()), "no kernel calls"),
    (_norm_plan, lambda plan: _plan(steps=plan.steps * 2)(plan), "two are called step"),
    (_norm_plan, lambda plan: _plan(buffers=(*plan.buffers, plan.buffers[-1]))(plan), "two are called logits"),
    (_norm_plan, lambda plan: _plan(weights=plan.weights * 2)(plan), "two are called in1"),
    (_norm_plan, _weight(name="in0"), "two are called in0"),
    (_norm_plan, _weight(name=""), "has no name"),
    (_norm_plan, _attrs(eps=1), "a number with a point"),
    (_norm_plan, _attrs(eps=-1.0), "must not be negative"),
    (_norm_plan, _plan(vocab_size=8), "logits"),
    (_norm_plan, _plan(vocab_size=1 << 70), "incompatible|cannot"),
    (_norm_plan, _plan(max_positions=0), "max_positions"),
    (_norm_plan, _limits(max_num_tokens=1 << 40), "max_num_tokens"),
    (_norm_plan, _limits(max_num_tokens=5000), "outside"),
    (_norm_plan, _kv(head_dim=6), "head_dim"),
    (_norm_plan, _kv(head_dim=516), "head_dim"),
    (_norm_plan, _kv(tokens_per_block=24), "tokens_per_block"),
    (_norm_plan, _kv(dtype=DType.I32), "KV caches"),
    (_norm_plan, _kv(kv_heads=0), "kv_heads"),
    (_matmul_plan, _weight(layout="row"), "its rows have 1600"),
    (_matmul_plan, _weight(nbytes=64), "says that it has 64 bytes"),
    (_matmul_plan, _weight(layout="panel16.bf16"), "layout"),
    (_matmul_plan, _weight(dtype=DType.F32), "does not take f32 weights"),
    (_matmul_plan, _weight(shape=(40, 21)), "columns"),
    (_matmul_plan, _weight(shape=(41, 20)), "even"),
    (_matmul_plan, _weight(shape=(4000, 20)), "columns"),
    (_matmul_plan, _piece(end=2), "panels"),
    (_matmul_plan, _piece(end=6), "not in order"),
    (_matmul_plan, _piece(begin=1), "not in order"),
    (_matmul_plan, _piece(offset=64), "outside"),
    (_matmul_plan, _attrs(activation="tanh"), "no activation"),
    (_matmul_plan, _attrs(gated=2), "gated"),
    (_matmul_plan, _attrs(activations="bf16"), "does not take"),
    (_attention_plan, _attrs(layer=1), "layer"),
    (_attention_plan, _attrs(heads=4), "columns"),
    (_attention_plan, _attrs(heads=1 << 40), "heads"),
    (_attention_plan, _attrs(head_dim=8), "head_dim"),
    (_attention_plan, _attrs(window=-1), "window"),
    (_attention_plan, _attrs(softcap=-1.0), "softcap"),
    (_attention_plan, _kv(kv_heads=3), "kv_heads"),
    (_attention_plan, _kv(dtype=DType.BF16), "takes f32"),
    (_attention_plan, _kv(layers=()), "layer"),
    (_attention_plan, _kv(layers=(1,)), "each layer from 0 on"),
    (_attention_plan, _kv(layers=(0, 0)), "each layer from 0 on"),
    (_attention_plan, _kv(window=-1), "window of a cache group is out of range"),
    (_attention_plan, _kv(window=4), "within that of the cache group, 4"),
]


@pytest.mark.parametrize(("make", "change", "words"), HOSTILE)
def test_a_wrong_plan_is_refused(
    make: Callable[[], tuple[Plan, Any]], change: Callable[[Plan], Plan], words: str
) -> None:
    plan, section = make()
    open_native(plan, section, OPTIONS, "avx2").close()
    with pytest.raises(EngineError, match=words):
        open_native(change(plan), section, OPTIONS, "avx2")


def test_kernels_beyond_the_level_are_refused() -> None:
    plan, section = _norm_plan()
    with pytest.raises(EngineError, match="needs avx512, this machine offers avx2"):
        open_native(_step(kernel="rms_norm.f32.avx512")(plan), section, OPTIONS, "avx2")


def test_sizes_beyond_the_machine_are_refused() -> None:
    plan, section = _norm_plan()
    with pytest.raises(CapacityError, match="larger than this machine's memory"):
        open_native(plan, section, SessionOptions(num_blocks=(1 << 30,), threads=1), "avx2")
    with pytest.raises(UsageError, match="threads"):
        open_native(plan, section, SessionOptions(num_blocks=(1,), threads=0), "avx2")


def _session(threads: int = 1) -> CpuSession:
    """Three sequences of up to 64 positions in 8 blocks of 16."""
    batch = batch_of([(0, 60), (0, 2), (0, 2)], [[0, 1, 2, 3], [4], [5]], [0, 1, 2])
    return open_step("gather_rows.f32.avx2", [np.ones((64, 5), np.float32)], {}, batch, threads=threads)


def _i32(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


GOOD = batch_of([(20, 2), (0, 1)], [[0, 1], [2]], [1, 2], draws=[0, 1])
BAD = [
    ({"ids": _i32(0, 7, 0)}, "token id 1 is 7"),
    ({"ids": _i32(0, -1, 0)}, "token id 1 is -1"),
    ({"ids": _i32(0, 0)}, "number of tokens"),
    ({"ids": _i32(), "query_starts": _i32(0)}, "tokens|sequence"),
    ({"ids": np.zeros(3, np.int64)}, "incompatible"),
    ({"query_starts": _i32(0, 3)}, "one entry per sequence"),
    ({"query_starts": _i32(0, 3, 3)}, "sequence 1 has no tokens"),
    ({"query_starts": _i32(0, 5, 3)}, "ascend"),
    ({"query_starts": _i32(1, 2, 3)}, "begin at 0"),
    ({"past_lengths": _i32(-1, 0)}, "sequence 0"),
    ({"past_lengths": _i32(70, 0)}, "reaches 72 tokens"),
    ({"past_lengths": _i32(2**31 - 1, 0)}, "sequence 0 reaches"),
    ({"past_lengths": _i32(40, 0)}, "needs 3 blocks"),
    *(
        ({"block_tables": np.array([tables], np.int32)}, why)
        for tables, why in (
            ([[0, 6], [2, -1]], "is 6"),
            ([[-1, 1], [2, -1]], "is -1"),
            ([[0, 1], [1, -1]], "block 1 is written"),
            ([[1, 1], [2, -1]], "block 1 is written"),
            ([[0, 1]], "one row per sequence"),
        )
    ),
    ({"logit_rows": _i32(2, 1)}, "ascend"),
    ({"logit_rows": _i32(1, 3)}, "logit row 1 is 3"),
    ({"draws": _i32(0, 2)}, "the row of a draw is 2"),
    ({"draws": _i32(0, -1)}, "the row of a draw is -1"),
    ({"draws": _i32(1, 1)}, "not neighbours"),
    ({"slots": _i32(0)}, "slots must have one entry per sequence"),
    ({"slots": _i32(0, 99)}, "a slot is 99"),
    ({"slots": _i32(0, -1)}, "a slot is -1"),
    ({"ids": _i32(-1, 0, 0), "slots": _i32(-1, 1), "draws": _i32(1)}, "a slot is -1"),
    ({"known": KnownTokens(row=_i32(2), token=_i32(0), top=_i32(0))}, "the row of a known token is 2"),
    ({"known": KnownTokens(row=_i32(1), token=_i32(7), top=_i32(0))}, "a known token is 7"),
    ({"known": KnownTokens(row=_i32(1), token=_i32(0), top=_i32(8))}, "fewer tokens"),
    ({"known": KnownTokens(row=_i32(1), token=_i32(0), top=_i32())}, "equal lengths"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_a_wrong_batch_is_refused_and_the_next_one_runs(changes: dict[str, Any], words: str) -> None:
    session = _session()
    with pytest.raises(RequestError, match=words):
        session.run(dataclasses.replace(GOOD, **changes))
    assert session.run(GOOD).ids.tolist() == [[0, 0]]


def test_a_prefix_may_be_shared_while_nobody_writes_it() -> None:
    shared = batch_of([(16, 1), (16, 1)], [[0, 1], [0, 2]], [1], draws=[0])
    assert _session().run(shared).ids.shape == (1, 1)
    with pytest.raises(RequestError, match="block 0 is written"):
        _session().run(batch_of([(16, 1), (15, 1)], [[0, 1], [0]]))


def test_a_closed_session_says_so() -> None:
    session = _session()
    session.close()
    session.close()
    with pytest.raises(RequestError, match="closed"):
        session.run(GOOD)


def test_hooks_refuse_what_is_not_there() -> None:
    native = _session().native
    for wrong in (
        lambda: native.read_buffer("nothing", 1),
        lambda: native.read_buffer("in0", 65),
        lambda: native.read_buffer("in0", -1),
        lambda: native.write_buffer("in0", np.ones((1, 6), np.float32)),
        lambda: native.tap(["nothing"]),
        lambda: native.read_kv(1, 0, False),
        lambda: native.read_kv(0, 6, False),
        lambda: native.write_kv(0, 0, False, b"short"),
        lambda: native.set_step_delay(-1.0),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            wrong()


def test_fill_kv_reaches_every_slot() -> None:
    native = _session().native
    native.fill_kv(float("nan"))
    for values in (False, True):
        assert np.isnan(np.frombuffer(native.read_kv(0, 5, values), np.float32)).all()


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.I8, DType.F8])
def test_kv_pools_are_as_large_as_the_layout_says(dtype: DType) -> None:
    plan, section = _norm_plan()
    plan = _kv(dtype=dtype, layers=(0, 1, 2), kv_heads=2, head_dim=24)(plan)
    session = open_native(plan, section, SessionOptions(num_blocks=(5,), threads=1), "avx2")
    assert session.native.kv_bytes == 5 * plan.block_bytes
    assert len(session.native.read_kv(2, 4, False)) == plan.caches[0].k_block_bytes
    assert len(session.native.read_kv(2, 4, True)) == plan.caches[0].v_block_bytes


def test_slow_down_and_interruption() -> None:
    session = _session(threads=2)
    session.slow_down(0.05)
    begin = time.monotonic()
    session.run(GOOD)
    assert time.monotonic() - begin >= 0.05
    session.slow_down(30)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        session.run(GOOD)
    assert time.monotonic() - begin < 5
    session.slow_down(0)
    assert session.run(GOOD).ids.tolist() == [[0, 0]]


def test_other_python_threads_go_on_during_a_step() -> None:
    session = _session()
    session.slow_down(0.2)
    worker = threading.Thread(target=session.run, args=(GOOD,))
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    assert turns > 1000


def test_idle_threads_sleep() -> None:
    _session(threads=2).run(GOOD)
    time.sleep(0.01)
    begin = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begin < 0.05


def test_a_forked_child_has_threads_of_its_own() -> None:
    session = _session(threads=2)
    session.run(GOOD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns that children of threaded processes may hang
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if session.run(GOOD).ids.tolist() == [[0, 0]] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert session.run(GOOD).ids.tolist() == [[0, 0]]


def test_the_affinity_of_the_caller_is_given_back() -> None:
    before = os.sched_getaffinity(0)
    _session(threads=2).run(GOOD)
    assert os.sched_getaffinity(0) == before


def _resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def test_memory_is_committed_when_it_is_used() -> None:
    plan, section = _norm_plan()
    large = dataclasses.replace(_kv(layers=tuple(range(32)), kv_heads=8, head_dim=64)(plan), arena_bytes=1 << 30)
    before = _resident_bytes()
    session = open_native(large, section, SessionOptions(num_blocks=(60,), threads=1), "avx2")
    assert session.native.kv_bytes > 100 << 20
    assert _resident_bytes() - before < 20 << 20, "a large arena and KV pool take address space only"
    session.native.fill_kv(0)
    assert _resident_bytes() - before > 100 << 20
    session.close()
    assert _resident_bytes() - before < 20 << 20


def test_a_batch_is_checked_against_its_copy() -> None:
    """What Python changes during a step does not reach the kernels."""
    session = _session()
    session.slow_down(0.1)
    batch: StepBatch = dataclasses.replace(GOOD, logit_rows=GOOD.logit_rows.copy())
    worker = threading.Thread(target=session.run, args=(batch,))
    worker.start()
    time.sleep(0.03)
    batch.logit_rows[:] = 1 << 30
    worker.join()
