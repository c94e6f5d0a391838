"""Checkpoints of other model types, with the logits and tokens that transformers gave: `families_next`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.runtime.model_runner import ModelRunner

TOLERANCE = 1e-4
DELTA_RULE = ("kimi_linear", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
TOLERANCE_OF_DELTA_RULE = 5e-4  # the reference has two forms of it, which differ by as much
NAMES = (
    *("cohere2", "exaone4", "granite", "ministral3", "olmo3", "smollm3"),
    *("falcon_h1", "granitemoehybrid", "granitemoehybrid_dense", "lfm2", "lfm2_moe", "nemotron_h"),
    *("gemma3n_text", "gemma4_moe_text", "gemma4_text"),
    *("glm4_moe", "gpt_oss", "gpt_oss_mxfp4", "hy_v3", "minimax_m2", "qwen2_moe"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"),
    *DELTA_RULE,
)

pytestmark = pytest.mark.shared


def logits_of_graph(checkpoint: Path, ids: list[int]) -> Any:
    session = onnxruntime.InferenceSession(checkpoint / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"input_ids": np.array([ids])})[0][0]


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_those_of_transformers(name: str, shared: Path, tmp_path: Path) -> None:
    """Whole prompts by onnxruntime; by an engine also in chunks of 7 and with 20 tokens more. Prompts that the model
    has no positions for are left out."""
    folder = shared / "models" / "families_next" / name
    tolerance = TOLERANCE_OF_DELTA_RULE if name in DELTA_RULE else TOLERANCE
    reference = json.loads((folder / "reference.json").read_text())
    model = convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / "c")).model
    build(BuildConfig(target="cpu", precision="f32", tokens_per_block=16), tmp_path / "c", tmp_path / "e")
    kept = [index for index, prompt in enumerate(reference["prompts"]) if len(prompt) < model.max_positions]
    prompts = [reference["prompts"][index] for index in kept]
    with np.load(folder / "reference.npz") as file:
        expected = [file[f"logits_{index}"] for index in kept]
    for ids, logits in zip(prompts, expected, strict=True):
        assert np.abs(logits_of_graph(tmp_path / "c", ids) - logits).max() < tolerance
    count = min(20, model.max_positions + 1 - max(map(len, prompts)))
    found = []
    for chunk in (None, 7):
        with ModelRunner.from_dir(tmp_path / "e", max_num_tokens=chunk, threads=1) as runner:
            out = runner.generate(
                prompts, max_new_tokens=count, end_id=-1, return_dict=True, output_context_logits=True
            )
        for place, (ids, logits) in enumerate(zip(prompts, expected, strict=True)):
            assert np.abs(out["context_logits"][place] - logits).max() < tolerance
            tokens = out["output_ids"][place][0][len(ids) : len(ids) + count].tolist()
            assert tokens == reference["greedy"][kept[place]][:count]
        found.append([each.tobytes() for each in out["context_logits"]])
    assert found[0] == found[1], "chunks change bits"
