"""Files of latent attention in FP8 with a scale for each 128 x 128 weights, as DeepSeek V3 and Kimi K2 store them: the
logits of transformers with the weights that torch makes of the codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.families.deepseek_v3 import FAMILY
from ingot.dtypes import DType
from ingot.engine import read_plan
from ingot.runtime.model_runner import ModelRunner
from tests.graph_logits import logits_of_graph
from tests.quantised import Tensors, save
from tests.tiny import random_model

BLOCK = 128
CONFIG: dict[str, Any] = {  # no size of a product is a multiple of a block, and most are more than one
    **FAMILY.tiny,
    "hidden_size": 176,
    "intermediate_size": 200,
    "q_lora_rank": 136,
    "kv_lora_rank": 132,
    "qk_nope_head_dim": 40,
    "v_head_dim": 36,
    "moe_intermediate_size": 140,
    "n_routed_experts": 4,  # each token takes all: none is chosen otherwise for a rounded input
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
}
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, the weight that they stand for)"""
    n, k = weight.shape
    scales = torch.empty(-(-n // BLOCK), -(-k // BLOCK))
    for row in range(len(scales)):
        for column in range(len(scales[0])):
            part = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = part.abs().max() / 448
    wide = scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def write(folder: Path) -> Any:
    """The model that transformers computes; its files in FP8, one expert a tensor."""
    model, tensors = random_model(CONFIG, seed=3), Tensors()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_proj", "_proj.weight", "kv_a_proj_with_mqa.weight")):
                stack = parameter if parameter.ndim == 3 else parameter[None]
                for number, matrix in enumerate(stack):
                    parts = _modules(name, matrix, number)
                    for module, part in parts.items():
                        codes, scales, meant = quantised(part)
                        part.copy_(meant)
                        tensors[f"{module}.weight"] = (DType.F8, codes.view(torch.uint8).numpy())
                        tensors[f"{module}.weight_scale_inv"] = (DType.F32, scales.numpy())
            else:
                tensors[name] = (DType.F32, parameter.numpy())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensors[name] = (DType.F32, buffer.numpy())
    save(folder, {**CONFIG, "quantization_config": SETTINGS}, tensors)
    return model


def _modules(name: str, matrix: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
    """Module of the files → the rows that it stores."""
    if ".experts." not in name:
        return {name.removesuffix(".weight"): matrix}
    block = f"{name.rpartition('.')[0]}.{number}"
    if name.endswith("down_proj"):
        return {f"{block}.down_proj": matrix}
    half = len(matrix) // 2
    return {f"{block}.gate_proj": matrix[:half], f"{block}.up_proj": matrix[half:]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("fp8")
    model = write(folder / "m")
    convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
    return folder, model


def test_the_graph_holds_the_codes(made: tuple[Path, Any]) -> None:
    folder, model = made
    ids = np.random.default_rng(2).integers(0, 61, (2, 40))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits_of_graph(folder / "c", ids) - expected).max() < 1e-5 * np.ptp(expected)
    kinds = json.loads((folder / "c" / "config.json").read_text())["quantised"]
    assert {kinds[f"layers.{layer}/attn/kv/weight"] for layer in range(3)} == {"fp8 f8g128"}


@pytest.mark.daily(1)
@pytest.mark.parametrize(("precision", "bound"), [("f32", 1e-5), ("bf16", 0.03), ("auto", 0.05)])
def test_engines(precision: str, bound: float, made: tuple[Path, Any]) -> None:
    """Absorbed products of heads are f32: each code times its scale, which bf16 would round."""
    folder, model = made
    build(BuildConfig(target="cpu", precision=precision, autotune=False), folder / "c", folder / precision)
    prompt = np.random.default_rng(4).integers(0, 61, 50).tolist()
    with ModelRunner.from_dir(folder / precision) as runner:
        out = runner.generate([prompt], max_new_tokens=1, return_dict=True, output_context_logits=True)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    error = np.sqrt(np.mean((out["context_logits"][0] - expected) ** 2)) / np.std(expected)
    assert error < bound
    kernels = {step.kernel for step in read_plan(folder / precision).steps if step.op == "head_matmul"}
    assert precision == "bf16" or {kernel.split(".")[1] for kernel in kernels} == {"f32"}
