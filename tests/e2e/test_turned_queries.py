"""Queries of many rows, which attention turns when it loads them: the bits that rope_kv_write gives, in every attention."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.plan import Plan, Step
from ingot.plugins.cpu.target import CpuSession, detect_isa, kernel_table, open_native
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from tests.handmade import write_model
from tests.plugins.cpu.one_step import LEVELS, batch_of

pytestmark = [
    pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target"),
]  # fmt: skip

SEQUENCES, LENGTH, BLOCK = 40, 50, 16  # rows of 48 numbers that are many, see kOwnElements of ingot/kernel.h
NORMED_TOGETHER, INTERLEAVED = "olmo2", "interleaved"
FAMILIES = {
    "gemma3_text": "windows and a norm of each head",
    "gpt2": "no rotation, no shared keys",
    "gpt_neox": "some dims turn",
    "llama": "all dims turn",
    NORMED_TOGETHER: "a norm of all heads, which attention leaves to the step before it",
}
HERE = LEVELS[: LEVELS.index(detect_isa()) + 1] if detect_isa() in LEVELS else ()
THROUGH = [
    (level, dtype)
    for level, dtypes in {
        **dict.fromkeys(HERE, (DType.F32, DType.BF16, DType.I8)), "avx512emu": (DType.F32, DType.I8), "amxemu": (DType.BF16,),
    }.items()
    for dtype in dtypes
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Built:
    name: str
    plan: Plan
    weights: npt.NDArray[np.uint8]

    def through(self, level: str, dtype: DType) -> Plan:
        """The same steps by kernels of a level, or of one that it includes, over a KV cache of `dtype`."""
        known = kernel_table()
        levels = {"amxemu": ("amxemu", "avx512emu"), "amx": ("amx", "avx512")}.get(level, (level,))

        def kernel(step: Step) -> str:
            stem = step.kernel.rsplit(".", 1)[0]
            if step.op in ("rope_kv_write", "paged_attention"):
                stem = f"{step.op}.{dtype.value}"
            return next(name for name in (f"{stem}.{each}" for each in levels) if name in known)

        steps = tuple(dataclasses.replace(step, kernel=kernel(step)) for step in self.plan.steps)
        return dataclasses.replace(self.plan, steps=steps, kv=dataclasses.replace(self.plan.kv, dtype=dtype))


@pytest.fixture(scope="module", params=[*FAMILIES, INTERLEAVED])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder, name = tmp_path_factory.mktemp("turned"), str(request.param)
    family = find_family("llama" if name == INTERLEAVED else name)
    convert(ConvertOptions(model_dir=write_model(folder / "m", family.tiny), output_dir=folder / "c"))
    config = BuildConfig(
        precision="w8", activations="int8", autotune=False, tokens_per_block=BLOCK, max_num_tokens=SEQUENCES * LENGTH,
        max_batch_size=SEQUENCES, target="cpu/avx2",
    )  # fmt: skip
    build(config, folder / "c", folder / "e")
    with open_engine(folder / "e") as engine:
        steps = tuple(
            dataclasses.replace(step, attrs={**step.attrs, "interleaved": 1})
            if name == INTERLEAVED and step.op == "rope_kv_write"
            else step
            for step in engine.plan.steps
        )
        yield Built(name, dataclasses.replace(engine.plan, steps=steps), engine.weights)


def _session(built: Built, plan: Plan, level: str, threads: int) -> CpuSession:
    blocks = SEQUENCES * -(-LENGTH // BLOCK)
    isa = "avx512emu" if level.endswith("emu") else level
    return open_native(plan, built.weights, SessionOptions(num_blocks=blocks, threads=threads), isa)


def _together() -> StepBatch:
    """A prompt of each sequence; the logits of some tokens."""
    width, rows = -(-LENGTH // BLOCK), range(LENGTH - 1, SEQUENCES * LENGTH, LENGTH)
    ids = np.random.default_rng(5).integers(0, 61, SEQUENCES * LENGTH).astype(np.int32)
    tables = np.arange(SEQUENCES * width).reshape(SEQUENCES, width).tolist()
    return batch_of([(0, LENGTH)] * SEQUENCES, tables, rows, ids=ids, want_logits=True)


def _writes(plan: Plan) -> set[int]:
    return {index for index, step in enumerate(plan.steps) if step.op == "rope_kv_write"}


def _cache(session: CpuSession, plan: Plan) -> list[bytes]:
    """Keys and values of some blocks."""
    read, layers = session.native.read_kv, range(plan.kv.num_layers)
    return [read(layer, block, values) for layer in layers for block in (0, 7, 100) for values in (False, True)]


@pytest.mark.parametrize(("level", "dtype"), THROUGH)
def test_attention_turns_them_as_the_step_before_it_would(built: Built, level: str, dtype: DType) -> None:
    """Steps that somebody looks into are all run as they are written in the plan."""
    plan = built.through(level, dtype)
    session, batch = _session(built, plan, level, 2), _together()
    turned, times = session.run_timed(batch)
    assert times.keys_only == (set() if built.name == NORMED_TOGETHER else _writes(plan))
    cache = _cache(session, plan)
    expected, _ = session.run_tapped(batch, [plan.steps[-1].name])
    assert turned.logits is not None and expected.logits is not None
    assert np.isfinite(turned.logits).all()
    assert turned.logits.tobytes() == expected.logits.tobytes()
    assert cache == _cache(session, plan)
    session.close()
