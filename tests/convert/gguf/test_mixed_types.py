"""Weights that are one in the Checkpoint, and of different types in a GGUF file; scales of stacks."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from tests import gguf_files as write
from tests.convert.gguf.test_architectures import CASES, write_case
from tests.graph_logits import logits_of_graph

IDS = np.random.default_rng(1).integers(0, 61, (2, 9))
EXPERTS = 3
Extra = dict[str, np.ndarray | write.Stored]
NUMBERS = {name: number for number, (name, *_) in write.BLOCKS.items()}


def assert_logits(
    folder: Path,
    name: str,
    change: Mapping[str, object],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    scales: Mapping[str, np.ndarray],
) -> None:
    """The logits are those of the same numbers in float32.

    tensors: type and shape, by the name in the first layer. scales: of tensors of NVFP4
    """
    case = dataclasses.replace(CASES[name], change={**CASES[name].change, **change})
    rng, stored, floats = np.random.default_rng(2), Extra(), Extra()
    for each, (kind, shape) in tensors.items():
        stored[f"blk.0.{each}.weight"], values = write.random_blocks(rng, NUMBERS[kind], shape)
        floats[f"blk.0.{each}.weight"] = values * scales.get(each, np.float32(1)).reshape(-1, 1, 1)
    beside: Extra = {f"blk.0.{each}.scale": values for each, values in scales.items()}
    logits = []
    for number, extra in enumerate(({**stored, **beside}, floats)):
        (folder / str(number)).mkdir()
        path, _ = write_case(folder / str(number), name, case, extra)
        convert(ConvertOptions(model_dir=path, output_dir=folder / f"checkpoint{number}"))
        logits.append(logits_of_graph(folder / f"checkpoint{number}", IDS))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-5 * np.ptp(logits[1]))


@pytest.mark.parametrize(
    ("gate", "up", "columns"),
    [("IQ2_XXS", "Q2_K", 256), ("IQ1_M", "IQ3_XXS", 256), ("NVFP4", "Q4_1", 64), ("NVFP4", "NVFP4", 64)],
)
def test_experts_whose_gates_are_of_another_type(tmp_path: Path, gate: str, up: str, columns: int) -> None:
    """Only gates have scales of whole tensors."""
    shape = (EXPERTS, 20, columns)
    change = {"num_hidden_layers": 1, "hidden_size": columns, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    scales = {"ffn_gate_exps": np.array([0.5, 1.25, 3], np.float32)} if gate == "NVFP4" else {}
    assert_logits(tmp_path, "qwen3moe", change, {"ffn_gate_exps": (gate, shape), "ffn_up_exps": (up, shape)}, scales)


def test_stacks_with_scales_of_gemma_4(tmp_path: Path) -> None:
    """Gates and ups lie in one stack; the scale beside the other stack is a weight of the model."""
    change = {"hidden_size": 64, "num_experts": EXPERTS, "moe_intermediate_size": 64}
    tensors = {"ffn_gate_up_exps": ("NVFP4", (EXPERTS, 128, 64)), "ffn_down_exps": ("NVFP4", (EXPERTS, 64, 64))}
    scales = {"ffn_gate_up_exps": np.array([0.5, 1.25, 3], np.float32)}
    assert_logits(tmp_path, "gemma4, experts", change, tensors, scales)
