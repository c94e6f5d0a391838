"""How often the threads of a CPU engine wait for each other, and that nothing they compute depends on it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.schedule import schedule
from ingot.configs.runtime import runtime_config
from ingot.engine import read_plan
from ingot.plan import Plan, Step
from ingot.plugins.cpu.native import detect_isa, kernel_table
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.op import Array
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.runtime.session import LoadedEngine, load_engine
from ingot.step_io import Int32, StepBatch
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.cpu.one_step import batch_of

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]

HIDDEN = 1024  # 16 rows of it are the most that every thread norms for itself
KINDS = {"int8": ("--precision", "w8", "--activations", "int8"), "bf16": ("--precision", "bf16")}
FEW_ROWS, MANY_ROWS = (1, 2, 8, 16), 17
PER_LAYER = 6  # qkv, rope_kv_write, paged_attention, attention_out, gate_up, down
NORMS, ROUNDINGS = 2, 4  # of a layer, where rows are many: one or the other has a barrier of its own


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KIND-LAYERS: engines of a llama of 2 and of 3 layers."""
    folder = tmp_path_factory.mktemp("barriers")
    for layers in (2, 3):
        config = {**TINY_LLAMA, "hidden_size": HIDDEN, "num_hidden_layers": layers, "max_position_embeddings": 128}
        model, checkpoint = write_model(folder / f"m{layers}", config), folder / f"c{layers}"
        ingot("convert", "--model_dir", model, "--output_dir", checkpoint).succeeds()
        for kind, options in KINDS.items():
            build = ("build", "--checkpoint_dir", checkpoint, "--output_dir", folder / f"{kind}-{layers}")
            ingot(*build, *options, "--target", "cpu/avx2", "--no_autotune").succeeds()
    return folder


@contextlib.contextmanager
def _opened(engine: Path, threads: int) -> Iterator[tuple[LoadedEngine, CpuSession]]:
    loaded = load_engine(engine, runtime_config(threads=threads))
    assert isinstance(loaded.session, CpuSession)
    try:
        yield loaded, loaded.session
    finally:
        loaded.session.close()
        loaded.engine.close()


def _decode(rows: int) -> StepBatch:
    """A token of each of `rows` sequences."""
    ids = (np.arange(rows, dtype=np.int32) * 7 + 1) % 61
    return batch_of([(0, 1)] * rows, [[block] for block in range(rows)], range(rows), ids=ids, want_logits=True)


def _chunk(past: int, ids: Int32) -> StepBatch:
    """The next tokens of one sequence."""
    return batch_of([(past, len(ids))], [range(4)], range(len(ids)), ids=ids, want_logits=True)


def _logits(session: CpuSession, batch: StepBatch) -> Array:
    found = session.run(batch).logits
    assert found is not None
    return found


def _barriers(engine: Path, rows: int) -> int:
    with _opened(engine, 2) as (_, session):
        session.run(_decode(rows))
        return int(session.native.barriers)


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_few_rows_has_six_barriers(engines: Path, kind: str) -> None:
    for rows in FEW_ROWS:
        shorter, longer = (_barriers(engines / f"{kind}-{layers}", rows) for layers in (2, 3))
        assert longer - shorter == PER_LAYER, f"{rows} rows"
        assert shorter - 2 * PER_LAYER <= 4, "embedding, rows of logits, last norm and lm_head"
    shorter, longer = (_barriers(engines / f"{kind}-{layers}", MANY_ROWS) for layers in (2, 3))
    assert longer - shorter == PER_LAYER + (ROUNDINGS - 2 if kind == "int8" else NORMS), "two K are below 1,024"


@pytest.mark.parametrize("kind", KINDS)
def test_products_that_round_rows_norm_them_too(engines: Path, kind: str) -> None:
    """Where rows are many, and none where somebody looks."""
    with _opened(engines / f"{kind}-3", 2) as (loaded, session):
        norms = {step.name for step in loaded.engine.plan.steps if step.op == "rms_norm"}
        for rows in (*FEW_ROWS, MANY_ROWS):
            _, times = session.run_timed(_decode(rows))
            expected = norms if kind == "int8" and rows == MANY_ROWS else set()
            ran = loaded.engine.plan.variant(times.variant)
            assert ran.inside() - ran.called() == expected, f"{rows} rows"
        _, outputs = session.run_tapped(_decode(MANY_ROWS), sorted(norms))
        assert outputs.keys() == norms


def _on_tiles(plan: Plan) -> Plan:
    """The same steps through the twins of kernels for AMX, and of AVX-512 where AMX has none."""
    known = kernel_table()

    def twin(step: Step) -> Step:
        stem = step.kernel.rsplit(".", 1)[0]
        tiles = f"{stem}.amxemu" in known
        attrs = (
            {**step.attrs, "activations": "bf16"} if tiles and step.attrs.get("activations") == "f32" else step.attrs
        )
        return dataclasses.replace(step, kernel=f"{stem}.{'amxemu' if tiles else 'avx512emu'}", attrs=attrs)

    return schedule(dataclasses.replace(plan, steps=tuple(map(twin, plan.steps))), find_target("cpu/avx2"))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_on_the_way_to_tiles(engines: Path, kind: str) -> None:
    """Rows in bf16 are normed there too."""
    with _opened(engines / f"{kind}-2", 1) as (loaded, _):
        plan = _on_tiles(loaded.engine.plan)
        options = SessionOptions(num_blocks=(MANY_ROWS,), threads=2)
        session = open_native(plan, loaded.engine.weights, options, "avx512emu")
        many, times = session.run_timed(_decode(MANY_ROWS))
        assert many.logits is not None
        inside = plan.variant(times.variant).inside()
        assert {step.op for step in plan.steps if step.name in inside} == {"rms_norm", "rope_kv_write"}
        for rows in (3, 16):
            assert _logits(session, _decode(rows)).tobytes() == many.logits[:rows].tobytes(), f"{rows} rows"
        _, outputs = session.run_tapped(_decode(MANY_ROWS), [plan.steps[-1].name])
        assert outputs[plan.steps[-1].name][plan.steps[-1].outputs[0]].tobytes() == many.logits.tobytes()
        session.close()


def test_every_sum_is_a_product_s(engines: Path) -> None:
    """So that a norm only reads the residual stream, and all threads may do that at once."""
    steps = read_plan(engines / "int8-3").steps
    norms, products = ([step for step in steps if step.op == op] for op in ("rms_norm", "matmul"))
    assert all(norm.inputs[2] == "" and norm.outputs[1] == "" for norm in norms)
    assert [step.name.split("/")[1] for step in products if step.inputs[3]] == ["attention_out", "down"] * 3


@pytest.mark.daily(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_the_number_of_threads_changes_no_bit(engines: Path, kind: str, threads: int) -> None:
    """Few rows, as many as many are, steps that all wait (as taps want it), and a text in chunks of any length."""
    ids = np.random.default_rng(3).integers(0, 61, 100).astype(np.int32)
    with _opened(engines / f"{kind}-3", 1) as (_, session):
        whole = _logits(session, _decode(MANY_ROWS))
        text = _logits(session, _chunk(0, ids))
    with _opened(engines / f"{kind}-3", threads) as (loaded, session):
        for rows in (*FEW_ROWS, MANY_ROWS):
            assert _logits(session, _decode(rows)).tobytes() == whole[:rows].tobytes(), f"{rows} rows"
        last = loaded.engine.plan.steps[-1]
        _, outputs = session.run_tapped(_decode(8), [last.name])
        assert outputs[last.name][last.outputs[0]].tobytes() == whole[:8].tobytes(), "every step waits"
        begin = 0
        for length in (1, 8, 60, 31):
            part = _logits(session, _chunk(begin, ids[begin : begin + length]))
            assert part.tobytes() == text[begin : begin + length].tobytes(), f"{length} tokens from {begin} on"
            begin += length
