"""Norms of many rows, which products compute while they round them, and queries of many rows, which attention rotates:
the bits of few rows, in every family."""

from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import runtime_config
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cpu.session import CpuSession
from ingot.runtime.session import load_engine
from tests.builder.test_schedule import covered
from tests.families import covering_families
from tests.handmade import write_model
from tests.plugins.cpu.one_step import batch_of, in_groups

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]

SEQUENCES, LENGTH = 40, 50  # rows of 24 numbers and more are many, see kPrivateRowElements
# Branches share their norm, which several products read, or norms stand behind the branches alone.
NO_NORM_BEFORE_PRODUCTS = {
    "afmoe",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "falcon_h1",
    "flex_olmo",
    "granitemoehybrid",
    "olmo2",
    "olmo3",
    "phi",
    "qwen3_5_moe_text",
}
# A norm runs over the queries of all heads, or the products with the keys of heads stand behind the rotation.
ROTATED_BEFORE_ATTENTION = {
    *("flex_olmo", "olmo2", "olmo3", "olmoe", "minimax_m2"),
    *(
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "kimi_linear",
        "mistral4",
    ),
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", covering_families())
def test_company_changes_no_bit(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", find_family(name).tiny)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    config = BuildConfig(
        precision="w8",
        activations="int8",
        autotune=False,
        tokens_per_block=16,
        max_num_tokens=SEQUENCES * LENGTH,
        max_batch_size=SEQUENCES,
    )
    build(config, tmp_path / "c", tmp_path / "e")
    ids = np.random.default_rng(5).integers(0, 61, (SEQUENCES, LENGTH)).astype(np.int32)
    loaded = load_engine(tmp_path / "e", runtime_config(threads=2))
    session, blocks = loaded.session, -(-LENGTH // 16)
    assert isinstance(session, CpuSession)
    together = batch_of(
        [(0, LENGTH)] * SEQUENCES,
        np.arange(SEQUENCES * blocks).reshape(SEQUENCES, blocks).tolist(),
        range(LENGTH - 1, SEQUENCES * LENGTH, LENGTH),
        ids=ids.reshape(-1),
        want_logits=True,
    )
    plan = loaded.engine.plan
    result, times = session.run_timed(in_groups(together, plan))
    assert result.logits is not None
    for own, row in zip(ids[::13], result.logits[::13], strict=True):
        single = batch_of([(0, LENGTH)], [range(blocks)], [LENGTH - 1], ids=own, want_logits=True)
        alone = session.run(in_groups(single, plan))
        assert alone.logits is not None
        assert alone.logits[0].tobytes() == row.tobytes()
    for variant in loaded.engine.plan.variants:
        covered(loaded.engine.plan, variant)
    ran = loaded.engine.plan.variant(times.variant)
    assert bool(ran.inside() - ran.called()) == (name not in NO_NORM_BEFORE_PRODUCTS)
    assert bool(ran.inside() & ran.called()) == (name not in ROTATED_BEFORE_ATTENTION)
    session.close()
    loaded.engine.close()
