"""vLLM's adapter without vLLM: the 4-bit checkpoint that it writes, and tokens counted step by step."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from tests.peers.adapters import vllm as adapter
from tests.peers.adapters.protocol import Job
from tests.peers.models import SHAPES, write_model

SHAPE = {
    **SHAPES["tinyllama"],
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}


def job(work: Path, weights: str) -> Job:
    return Job(work=work, model="tiny", peer="vllm", weights=weights, isa="avx2", threads=1, regimes="decode:2")


def test_its_four_bits_are_gptq(tmp_path: Path) -> None:
    """Every code is the nearest one, and another reader of GPTQ takes the checkpoint."""
    task = job(tmp_path, "GPTQ g128")
    write_model(SHAPE, task.checkpoint)
    adapter.prepare(task)
    before, after = load_file(task.checkpoint / "model.safetensors"), load_file(task.prepared / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    words, scales = after[f"{name}.qweight"].numpy().view(np.uint32), after[f"{name}.scales"].float().numpy()
    codes = (words[:, None, :] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15).reshape(-1, words.shape[1])
    steps = np.repeat(scales, 128, axis=0)
    values = (codes.astype(np.float32) - 8) * steps
    assert np.abs(values.T - before[f"{name}.weight"].float().numpy()).max() <= 0.501 * steps.max()
    assert (after[f"{name}.qzeros"].numpy().view(np.uint32) == 0x77777777).all()
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    convert(ConvertOptions(model_dir=task.prepared, output_dir=tmp_path / "converted"))
    assert json.loads((task.prepared / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"


class FakeEngine:
    """A token of every request in each step; `from_engine_args` is that of vLLM."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.open: dict[str, list[int]] = {}

    @classmethod
    def from_engine_args(cls, arguments: Any) -> "FakeEngine":
        return cls(arguments)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert name not in self.open
        assert params.ignore_eos
        self.open[name] = [params.max_tokens, 0]

    def has_unfinished_requests(self) -> bool:
        return bool(self.open)

    def step(self) -> list[Any]:
        outputs = []
        for name, (most, done) in list(self.open.items()):
            self.open[name][1] = done + 1
            outputs.append(
                types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[0] * (done + 1))])
            )
            if done + 1 == most:
                del self.open[name]
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = types.ModuleType("vllm")
    fake.__version__ = "1.0"
    fake.EngineArgs = fake.SamplingParams = types.SimpleNamespace
    parts: dict[str, Any] = {name: types.ModuleType(name) for name in ("vllm.v1", "vllm.v1.engine")}
    parts["vllm.v1.engine.llm_engine"] = types.SimpleNamespace(LLMEngine=FakeEngine)
    for name, module in {"vllm": fake, **parts}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in adapter.VARIABLES:
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("vllm")
def test_tokens_are_counted_step_by_step(tmp_path: Path) -> None:
    engine = adapter.Engine(job(tmp_path, "bf16"), running=3)
    assert engine.engine.arguments.max_num_seqs == 3
    engine.add(7, [1, 2], 2)
    engine.add(8, [1], 3)
    assert [engine.step() for _ in range(3)] == [{7: 1, 8: 1}, {7: 1, 8: 1}, {8: 1}]
    engine.add(7, [1], 1)  # the same number again is another request
    assert engine.step() == {7: 1}
    with pytest.raises(RuntimeError, match="before they had all"):
        engine.step()


@pytest.mark.usefixtures("vllm")
def test_a_regime_ends_with_the_last_token(tmp_path: Path) -> None:
    version, speeds = adapter.measure(job(tmp_path, "bf16"))
    assert version == "vllm 1.0"
    assert speeds.keys() == {"decode:2"}
