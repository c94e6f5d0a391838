"""Models whose layers have heads of several sizes, on the emulated GPU: Gemma 4 in the forms that it comes in."""

import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.errors import EngineError
from ingot.plan import Plan
from ingot.plugins.cuda.plan_facts import CODE_LAYOUT, code_weights, tiles_of
from ingot.plugins.cuda.session import device_bytes
from ingot.plugins.cuda.shapes import Tiles, prefill_parts
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import batch_of, in_groups
from tests.plugins.cuda import test_session as sessions

SHARING: dict[str, object] = {  # Gemma 4 E2B and E4B: the last layers read the caches of earlier ones
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 288,
}
MIXED: dict[str, object] = {  # 26B-A4B: values made of keys, fewer key heads in full layers, experts beside the MLP
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
HEADS = {  # of several sizes in one model; what prompts take at most in an item, and into how many tiles it is cut
    "wide": ({**SHARING}, 64, {16: 1, 288: 4}),
    "experts": ({**MIXED, "global_head_dim": 288}, 64, {16: 1, 288: 8}),
    "narrow": ({**MIXED, "global_head_dim": 32}, 64, {16: 1, 32: 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "precision"),
    [("wide", "bf16"), ("experts", "f16"), ("narrow", "bf16"), ("experts", "w8"), ("wide", "f32")],
)
def test_heads_of_several_sizes(gpu: ctypes.CDLL, heads: str, precision: str, tmp_path: Path) -> None:
    """Each size has machine code of its own; all layers take the same items."""
    changes, tokens, parts = HEADS[heads]
    codes = precision.startswith("w")
    engine = sessions._engine(tmp_path, "gemma4_text", DType.BF16 if codes else None, changes, precision=precision)
    sessions._compare(engine, "bf16" if codes else precision)
    plan = open_engine(engine).plan
    assert tiles_of(plan) == Tiles(decode=16 // max(2, 4 * ("num_global_key_value_heads" in changes)), prefill=128 // 2)
    assert list(code_weights(plan)) == list(parts)
    assert {dim: prefill_parts(tokens, group, dim) for dim, group in _groups(plan).items()} == parts


def _groups(plan: Plan) -> dict[int, int]:
    """Dims of heads → query heads that share a key head."""
    attentions = [each.attrs for each in plan.steps if each.op == "paged_attention"]
    return {int(each["head_dim"]): int(each["heads"]) // int(each["kv_heads"]) for each in attentions}


@pytest.mark.slow
def test_a_model_with_heads_of_two_sizes(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    """Its weights with both pieces of code, its tables and both pools take on the GPU what the estimate says."""
    engine = open_engine(sessions._engine(tmp_path, "gemma4_text", precision="f32"))
    assert [(each.name, each.layout) for each in code_weights(engine.plan).values()] == [
        ("code", f"{CODE_LAYOUT}sm_90a"),
        ("code.head_dim12", f"{CODE_LAYOUT}sm_90a"),
    ]
    session = sessions._gpu(engine, 8)
    expected = device_bytes(engine.plan) + 8 * engine.plan.block_bytes
    assert expected <= gpu.emulated_taken() < expected + 4096
    ids = np.arange(21, dtype=np.int32)
    batch = in_groups(batch_of([(0, 20), (0, 1)], [[0, 1], [2]], [19, 20], ids=ids, want_logits=True), engine.plan)
    logits, found = (each.run(batch).logits for each in (sessions._ref(engine, 8), session))
    assert found is not None
    assert logits is not None
    np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5 * float(np.ptp(logits)))
    session.close()


def test_code_for_every_size_of_heads_must_be_there(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    engine = open_engine(sessions._engine(tmp_path, "gemma4_text", precision="f32"))
    lost = dataclasses.replace(engine.plan, weights=engine.plan.weights[:-1])
    with pytest.raises(EngineError, match=r"no machine code that(.|\n)*of 16 and of 12 dims(.|\n)*got: 1 piece"):
        find_target("cuda/sm90").open_session(lost, engine.weights, SessionOptions(num_blocks=(4, 4)))
