"""Scales that are finite, but too large for values in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType, from_float32, to_float32
from ingot.errors import CheckpointError
from tests import quantised as write
from tests.convert.gguf.test_blocks import write_llama
from tests.convert.quantised.test_formats import CASES
from tests.convert.quantised.test_read import Q, written
from tests.gguf_files import floats

WORDS = "the scales of a quantised weight are so large that its values are infinite in float32"


def with_number(part: str, value: float, dtype: DType) -> Any:
    """The last number of a tensor becomes another, and the tensor one of this type."""

    def change(tensors: write.Tensors) -> None:
        kind, bits = tensors[f"{Q}.{part}"]
        values = to_float32(bits, kind).copy()
        values.reshape(-1)[-1] = value
        tensors[f"{Q}.{part}"] = (dtype, from_float32(values, dtype))

    return change


@pytest.mark.parametrize(
    ("name", "part", "dtype", "value", "words"),
    [
        ("gptq v2, ragged groups, bf16", "scales", DType.BF16, 3e38, "at most 1.13e+37"),
        ("ct 4 bits, ragged groups", "weight_scale", DType.BF16, -3e38, "at most 4.25e+37"),
        ("ct int8", "weight_scale", DType.F32, 3e38, "at most 2.66e+36"),
        ("ct fp8 blocks", "weight_scale", DType.BF16, 1e37, "at most 7.6e+35"),
        ("fp8 blocks", "weight_scale_inv", DType.F32, 3e38, "at most 7.6e+35"),
        ("modelopt nvfp4 that says fp8", "weight_scale_2", DType.F32, 3e38, "codes and factors"),
        ("bitnet", "weight_scale", DType.F32, 1e-39, "codes and factors"),
        ("hqq 4 bits", "scale", DType.F32, 3e38, "got: 3e+38"),
        ("bnb int8", "SCB", DType.F32, 3.4e38, "got: 2.68e+36"),
    ],
)
def test_a_scale_that_is_too_large(
    tmp_path: Path, name: str, part: str, dtype: DType, value: float, words: str
) -> None:
    settings, packer, _ = CASES[name]
    model = written(tmp_path / "model", dict(settings), packer, with_number(part, value, dtype))
    with pytest.raises(CheckpointError) as caught:
        convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "checkpoint"))
    assert str(caught.value).startswith(WORDS)
    assert words in str(caught.value)
    assert str(model / "model.safetensors") in str(caught.value.where)
    assert Q in str(caught.value.where)
    assert not (tmp_path / "checkpoint").exists()


def test_the_largest_scale_that_fits(tmp_path: Path) -> None:
    settings, packer, _ = CASES["ct 4 bits, ragged groups"]
    change = with_number("weight_scale", 4e37, DType.BF16)
    model = written(tmp_path / "model", dict(settings), packer, change)
    assert not convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "checkpoint")).warnings


def test_an_exponent_that_is_too_large(tmp_path: Path) -> None:
    settings, packer, _ = CASES["ct mxfp4"]

    def change(tensors: write.Tensors) -> None:
        tensors[f"{Q}.weight_scale"][1][0, 0] = 254

    model = written(tmp_path / "model", dict(settings), packer, change)
    with pytest.raises(CheckpointError, match=WORDS):
        convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "checkpoint"))


def test_a_scale_of_a_whole_tensor_of_q4_k(tmp_path: Path) -> None:
    write_llama(tmp_path, 12, more={"blk.0.attn_q.scale": floats(np.array([3.4e38]))})
    with pytest.raises(CheckpointError, match=WORDS) as caught:
        convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    assert caught.value.where == f"{tmp_path / 'model.gguf'}: blk.0.attn_q.weight"
