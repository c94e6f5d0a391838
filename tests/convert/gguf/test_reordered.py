"""Quantised weights of GGUF files whose rows or columns move: the values stay."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.header import read_gguf_header
from ingot.errors import IngotError
from tests import gguf_files as write
from tests.convert.gguf.llama_cpp import Case, Settings
from tests.convert.gguf.test_architectures import CASES, write_case
from tests.convert.test_golden import TOLERANCE
from tests.graph_logits import logits_of_graph

QUANTISED: dict[str, Settings] = {
    "qwen35": {
        **{"hidden_size": 64, "intermediate_size": 96, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
        **{"ssm.state_size": 32, "ssm.inner_size": 128},
    },
    "lfm2": {"hidden_size": 64},
    "nemotron_h": {"hidden_size": 64, "intermediate_size": 96, "mamba_head_dim": 16, "ssm.inner_size": 96},
}


@pytest.mark.daily(2)
@pytest.mark.parametrize("kind", [2, 8, 39])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_whose_rows_or_columns_move(tmp_path: Path, name: str, kind: int) -> None:
    """The same values as blocks and as floats: the same logits."""
    case, sizes = CASES[name], QUANTISED[name]
    change = {key: value for key, value in sizes.items() if "." not in key}
    settings = {key: value for key, value in sizes.items() if "." in key}
    if name == "nemotron_h":
        settings["feed_forward_length"] = [0, 96, 0]
    case = dataclasses.replace(case, change={**case.change, **change}, settings={**case.settings, **settings})
    count, off = _difference(tmp_path, name, case, lambda key, shape: kind if len(shape) == 2 else None)
    assert count > 8
    assert off < TOLERANCE


@pytest.mark.daily(1)
@pytest.mark.parametrize(("keys", "values"), [(8, 2), (6, 12), (2, None), (None, 7)])
def test_keys_and_values_of_a_latent(tmp_path: Path, keys: int | None, values: int | None) -> None:
    """DeepSeek in two products, of which blocks of the one become columns: their values become float32."""
    change = {"qk_nope_head_dim": 32, "v_head_dim": 12, "kv_lora_rank": 256}
    sizes: Settings = {"attention.key_length_mla": 40, "attention.value_length_mla": 12}
    sizes |= {"attention.kv_lora_rank": 256, "attention.key_length": 264, "attention.value_length": 256}
    case = CASES["deepseek2, third"]
    case = dataclasses.replace(case, change={**case.change, **change}, settings={**case.settings, **sizes})
    kinds = {"attn_k_b": keys, "attn_v_b": values}

    def kind_of(key: str, shape: tuple[int, ...]) -> int | None:
        return kinds.get(key.split(".")[-2])

    count, off = _difference(tmp_path, "deepseek2, third", case, kind_of)
    assert count >= 3, "one of each layer"
    assert off < TOLERANCE


def _difference(
    folder: Path, name: str, case: Case, kind_of: Callable[[str, tuple[int, ...]], int | None]
) -> tuple[int, float]:
    """How many tensors are blocks; how far logits are off those of the same values as floats, of their range. kind_of:
    the type of a tensor, None for floats."""
    path, _ = write_case(folder, name, case)
    header, rng = read_gguf_header(path), np.random.default_rng(3)
    blocks, floats, count = dict[str, write.Stored](), dict[str, write.Stored](), 0
    data = path.read_bytes()
    for key, tensor in header.tensors.items():
        kind = kind_of(key, tensor.shape)
        if kind is not None and tensor.shape[-1] % write.BLOCKS[kind][1] == 0 and key != "token_embd.weight":
            blocks[key], values = write.random_blocks(rng, kind, tensor.shape)
            count += 1
        else:
            raw = data[tensor.offset : tensor.offset + tensor.nbytes]
            values = np.frombuffer(raw, np.float32).reshape(tensor.shape)
            blocks[key] = write.floats(values)
        floats[key] = write.floats(values)
    ids = rng.integers(0, 61, (1, 40))
    found = []
    for index, tensors in enumerate((blocks, floats)):
        file = write.write_gguf(folder / f"{index}.gguf", dict(header.settings), tensors)
        convert(ConvertOptions(model_dir=file, output_dir=folder / f"c{index}"))
        found.append(logits_of_graph(folder / f"c{index}", ids))
    return count, float(np.abs(found[0] - found[1]).max() / np.ptp(found[1]))


def test_columns_that_share_a_scale_across_heads(tmp_path: Path) -> None:
    """Value heads of 20 columns cannot move where a block has 32."""
    case = dataclasses.replace(CASES["qwen35"], change={"linear_num_value_heads": 8, "hidden_size": 64})
    case = dataclasses.replace(case, settings={**case.settings, "ssm.inner_size": 160, "ssm.time_step_rank": 8})
    path, _ = write_case(tmp_path, "qwen35", case)
    header = read_gguf_header(path)
    data = path.read_bytes()
    tensors = {
        key: write.floats(np.frombuffer(data[t.offset : t.offset + t.nbytes], np.float32).reshape(t.shape))
        for key, t in header.tensors.items()
    }
    tensors["blk.0.ssm_out.weight"], _ = write.random_blocks(np.random.default_rng(1), 8, (64, 160))
    file = write.write_gguf(tmp_path / "q.gguf", dict(header.settings), tensors)
    with pytest.raises(IngotError, match=r"share scales across heads(.|\n)*blk.0.ssm_out"):
        convert(ConvertOptions(model_dir=file, output_dir=tmp_path / "c"))
