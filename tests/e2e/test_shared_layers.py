"""A model whose last layers read keys and values of earlier ones, with heads of two sizes: the same bits in chunks, in
company, after prefix hits and preemption; what its cache takes; quantised engines beside the exact one."""

import json
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.families.gemma4_text import FAMILY
from ingot.engine import read_plan
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.runtime.model_runner import ModelRunner
from tests.e2e.same_bits import (
    COLD,
    HEADS,
    OWN_KERNELS,
    SIZE,
    build_for_all,
    check_chunks,
    opened,
    prompts_of,
    random_checkpoint,
)
from tests.runtime.test_bit_identity import generations
from tests.runtime.tiny_engine import poisoned_runner
from tests.runtime.tiny_plan import TinyModel

LONGEST = 200
POOLS = (60, 60)
CONFIG = {
    **FAMILY.tiny,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("shared"), CONFIG)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    return build_for_all(checkpoint, checkpoint.parent / "e", "f32", LONGEST)


@pytest.fixture(params=OWN_KERNELS["f32"])
def target(request: pytest.FixtureRequest) -> Target:
    return find_target(request.param)


@pytest.fixture
def model(engine: Path, target: Target) -> TinyModel:
    return opened(engine, target)


def test_each_kind_has_a_group_with_one_layer(engine: Path) -> None:
    plan = read_plan(engine, target="ref")
    found = [(group.window, group.layers, group.kv_heads, group.head_dim) for group in plan.caches]
    assert found == [(16, (0,), 2, 8), (0, (1,), 2, 12)]
    attentions = [step for step in plan.steps if step.op == "paged_attention"]
    assert [step.attrs["layer"] for step in attentions] == [0, 1, 0, 1]
    assert sum(step.op == "rope_kv_write" for step in plan.steps) == 2


@pytest.mark.slow
def test_chunks_and_company_change_no_bit(model: TinyModel, target: Target) -> None:
    check_chunks(model, target, POOLS)


@pytest.mark.slow
def test_a_prefix_hit_at_any_boundary_changes_no_bit(model: TinyModel, target: Target) -> None:
    for head in HEADS:
        prompts = prompts_of(5, 11, 3, head=head)
        calm = []
        for prompt in prompts:
            with poisoned_runner(model, target, POOLS, config=COLD) as runner:
                calm += generations(runner, [prompt])
        with poisoned_runner(model, target, POOLS, seed=head) as runner:
            assert [generations(runner, [prompt])[0] for prompt in prompts] == calm, f"{head} tokens in common"
            assert runner.stats()["prefix_hit_tokens"] >= head


@pytest.mark.slow
def test_preemption_changes_no_bit(model: TinyModel, target: Target) -> None:
    prompts = prompts_of(2, 9, 5, 1, head=17)
    with poisoned_runner(model, target, (200, 200)) as runner:
        calm = generations(runner, prompts, 36)
        assert runner.stats()["preemptions"] == 0
    with poisoned_runner(model, target, (200, 8)) as runner:  # of the window, of all
        assert generations(runner, prompts, 36) == calm
        assert runner.stats()["preemptions"] > 0
        assert runner.stats()["blocks_used"] == 0


@pytest.mark.daily(2)
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_moe_text"])
@pytest.mark.parametrize(("precision", "bound"), [("w8", 0.12), ("w4g32", 0.6)])
def test_quantised_engines_are_near_the_exact_logits(
    precision: str, bound: float, name: str, shared: Path, tmp_path: Path
) -> None:
    """Rows of 32 columns round coarsely."""
    folder = shared / "models" / "families_next" / name
    prompt = json.loads((folder / "reference.json").read_text())["prompts"][1]
    with np.load(folder / "reference.npz") as file:
        exact = file["logits_1"]
    convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / "c"))
    build(BuildConfig(target="cpu", precision=precision, tokens_per_block=SIZE), tmp_path / "c", tmp_path / "e")
    with ModelRunner.from_dir(tmp_path / "e") as runner:
        out = runner.generate([prompt], max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    assert np.sqrt(((out["context_logits"][0] - exact) ** 2).mean()) < bound * exact.std()
