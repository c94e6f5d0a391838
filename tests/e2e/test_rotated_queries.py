"""Queries of many rows, which attention rotates when it loads them: the bits of rope_kv_write, in every attention."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.builder import lower
from ingot.builder.build import build
from ingot.builder.schedule import schedule
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.plan import Plan, Step
from ingot.plugins.cpu.native import detect_isa, kernel_table, offered_isas
from ingot.plugins.cpu.session import CpuSession, open_native
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch, StepTimes
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.cpu.one_step import batch_of, in_groups

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]

SEQUENCES, LENGTH, BLOCK = 40, 50, 16  # rows of 48 numbers that are many, see kPrivateRowElements of ingot/kernel.h
NORMED_TOGETHER, INTERLEAVED = "olmo2", "interleaved"
FAMILIES = {
    "gemma3_text": "windows and a norm of each head",
    "gpt2": "no rotation, no shared keys",
    "gpt_neox": "some dims rotate",
    "llama": "all dims rotate",
    NORMED_TOGETHER: "a norm of all heads, which attention leaves to the step before it",
}
HERE = [level for level in offered_isas() if not level.startswith("avxvnni")]  # whose own kernels are products alone
THROUGH = [
    (level, dtype)
    for level, dtypes in {
        **dict.fromkeys(HERE, (DType.F32, DType.BF16, DType.I8)),
        "avx512emu": (DType.F32, DType.I8),
        "amxemu": (DType.BF16,),
    }.items()
    for dtype in dtypes
]
CONFIG = BuildConfig(
    precision="w8",
    activations="int8",
    autotune=False,
    tokens_per_block=BLOCK,
    max_num_tokens=SEQUENCES * LENGTH,
    max_batch_size=SEQUENCES,
    target="cpu/avx2",
)


@dataclasses.dataclass(frozen=True)
class Built:
    name: str
    plan: Plan
    weights: npt.NDArray[np.uint8]

    def through(self, level: str, dtype: DType) -> Plan:
        """The same steps by kernels of a level, or of one that it includes, over a KV cache of `dtype`."""
        known = kernel_table()
        above = {"amxemu": ("amxemu", "avx512emu"), "amx": ("amx", "avx512"), "avx512bf16": ("avx512bf16", "avx512")}
        levels = above.get(level, (level,))

        def kernel(step: Step) -> str:
            stem = step.kernel.rsplit(".", 1)[0]
            if step.op in ("rope_kv_write", "paged_attention"):
                stem = f"{step.op}.{dtype.value}"
            return next(name for name in (f"{stem}.{each}" for each in levels) if name in known)

        steps = tuple(dataclasses.replace(step, kernel=kernel(step)) for step in self.plan.steps)
        plan = dataclasses.replace(
            self.plan, steps=steps, caches=tuple(dataclasses.replace(each, dtype=dtype) for each in self.plan.caches)
        )
        return schedule(plan, find_target("cpu/avx2"))


@pytest.fixture(scope="module", params=[*FAMILIES, INTERLEAVED])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder, name = tmp_path_factory.mktemp("rotated"), str(request.param)
    family = find_family("llama" if name == INTERLEAVED else name)
    convert(ConvertOptions(model_dir=write_model(folder / "m", family.tiny), output_dir=folder / "c"))
    build(CONFIG, folder / "c", folder / "e")
    with open_engine(folder / "e") as engine:
        steps = tuple(
            dataclasses.replace(step, attrs={**step.attrs, "interleaved": 1})
            if name == INTERLEAVED and step.op == "rope_kv_write"
            else step
            for step in engine.plan.steps
        )
        yield Built(name, dataclasses.replace(engine.plan, steps=steps), engine.weights)


def _session(plan: Plan, weights: npt.NDArray[np.uint8], level: str = "avx2", threads: int = 2) -> CpuSession:
    blocks = SEQUENCES * -(-LENGTH // BLOCK)
    isa = "avx512emu" if level.endswith("emu") else level
    return open_native(plan, weights, SessionOptions(num_blocks=plan.in_each(blocks), threads=threads), isa)


def _together() -> StepBatch:
    """A prompt of each sequence; the logits of some tokens."""
    width, rows = -(-LENGTH // BLOCK), range(LENGTH - 1, SEQUENCES * LENGTH, LENGTH)
    ids = np.random.default_rng(5).integers(0, 61, SEQUENCES * LENGTH).astype(np.int32)
    tables = np.arange(SEQUENCES * width).reshape(SEQUENCES, width).tolist()
    return batch_of([(0, LENGTH)] * SEQUENCES, tables, rows, ids=ids, want_logits=True)


def _writes(plan: Plan) -> set[str]:
    return {step.name for step in plan.steps if step.op == "rope_kv_write"}


def _called_twice(plan: Plan, times: StepTimes) -> set[str]:
    """Steps that were called for keys and values alone."""
    ran = plan.variant(times.variant)
    return set(ran.called() & ran.inside())


def _cache(session: CpuSession, plan: Plan) -> list[bytes]:
    """Keys and values of some blocks."""
    read, layers = session.native.read_kv, range(plan.num_layers)
    return [read(layer, block, values) for layer in layers for block in (0, 7, 100) for values in (False, True)]


@pytest.mark.daily(4)
@pytest.mark.parametrize(("level", "dtype"), THROUGH)
def test_attention_rotates_them_as_the_step_before_it_would(built: Built, level: str, dtype: DType) -> None:
    """Steps that somebody looks into are all run as they are written in the plan."""
    plan = built.through(level, dtype)
    session, batch = _session(plan, built.weights, level), in_groups(_together(), plan)
    rotated, times = session.run_timed(batch)
    assert _called_twice(plan, times) == (set() if built.name == NORMED_TOGETHER else _writes(plan))
    cache = _cache(session, plan)
    expected, _ = session.run_tapped(batch, [plan.steps[-1].name])
    assert rotated.logits is not None
    assert expected.logits is not None
    assert np.isfinite(rotated.logits).all()
    assert rotated.logits.tobytes() == expected.logits.tobytes()
    assert cache == _cache(session, plan)
    session.close()


@pytest.mark.parametrize("built", ["llama"], indirect=True)
def test_engines_whose_attention_writes_over_qkv(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were built before inputs were kept: queries are rotated before, to the same bits."""
    use = lower._use
    monkeypatch.setattr(lower, "_use", lambda draft: dataclasses.replace(use(draft), keeps_inputs=False))
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", find_family("llama").tiny), output_dir=tmp_path / "c"))
    build(CONFIG, tmp_path / "c", tmp_path / "e")
    with open_engine(tmp_path / "e") as engine:
        found = []
        for plan, weights in ((engine.plan, engine.weights), (built.plan, built.weights)):
            session = _session(plan, weights)
            result, times = session.run_timed(in_groups(_together(), plan))
            assert result.logits is not None
            found.append((result.logits.tobytes(), len(_called_twice(plan, times))))
            session.close()
    assert found[0][0] == found[1][0]
    assert [count for _, count in found] == [0, 2]


def test_threads_that_share_a_text(tmp_path: Path) -> None:
    """Each split of a long context rotates the queries for itself."""
    config = {**TINY_LLAMA, "hidden_size": 1024, "max_position_embeddings": 700}  # 17 rows are many
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", config), output_dir=tmp_path / "c"))
    build(dataclasses.replace(CONFIG, max_num_tokens=640), tmp_path / "c", tmp_path / "e")
    ids = np.random.default_rng(6).integers(0, 61, 700).astype(np.int32)
    first, second = (
        batch_of([(begin, end - begin)], [range(44)], [end - begin - 1], ids=ids[begin:end], want_logits=True)
        for begin, end in ((0, 640), (640, 700))
    )
    found, barriers = set(), []
    with open_engine(tmp_path / "e") as engine:
        for threads in (1, 8):
            session = _session(engine.plan, engine.weights, threads=threads)
            session.run(first)
            rotated, times = session.run_timed(second)
            assert _called_twice(engine.plan, times) == _writes(engine.plan)
            expected, _ = session.run_tapped(second, [engine.plan.steps[-1].name])
            assert rotated.logits is not None
            assert expected.logits is not None
            found |= {rotated.logits.tobytes(), expected.logits.tobytes()}
            barriers.append(times.barriers)
            session.close()
    assert len(found) == 1
    assert barriers[1] - barriers[0] == 2, "splits are merged after a barrier of each layer's own"
