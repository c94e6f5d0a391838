"""safetensors files: read as they are, refused in words when they are not sound."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import TensorFileWriter, TensorSpec, read_elements, read_header, read_rows

ARRAYS: dict[str, np.ndarray] = {
    "a": np.arange(15, dtype=np.float32).reshape(5, 3),
    "b": np.arange(7, dtype=np.float16),
    "scalar": np.array(2.5, dtype=np.float32),
}


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert set(header) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert header[name].shape == array.shape
        np.testing.assert_array_equal(read_rows(header[name]).reshape(array.shape), array)
    np.testing.assert_array_equal(read_rows(header["a"], 1, 3), ARRAYS["a"][1:3])
    np.testing.assert_array_equal(read_elements(header["a"], 4, 11), ARRAYS["a"].reshape(-1)[4:11])


def test_the_reference_reads_what_we_write(tmp_path: Path) -> None:
    specs = [TensorSpec(name=name, dtype=DType.F32, shape=shape) for name, shape in (("x", (3, 5)), ("y", (4,)))]
    x, y = np.arange(15, dtype=np.float32), np.arange(4, dtype=np.float32)
    with TensorFileWriter(tmp_path / "x.safetensors", specs) as file:
        for block in (x[:8], x[8:], y):
            file.write(block)
    loaded = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(loaded["x"], x.reshape(3, 5))
    np.testing.assert_array_equal(loaded["y"], y)
    assert read_header(tmp_path / "x.safetensors") == file.tensors
    assert file.tensors["x"].offset % 64 == 0


def test_writing_too_little_is_our_bug(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype=DType.F32, shape=(3,))
    with pytest.raises(AssertionError, match="its header promises"), TensorFileWriter(tmp_path / "x", [spec]):
        pass


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry("F32", [2], 0, 8)}, 7, "truncated: tensor a"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "belong to no tensor"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, 8, "tensor b overlaps"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 12, 16)}, 16, "tensor b leaves a hole"),
        ({"a": entry("F32", [2], 0, 4)}, 4, "do not fit its shape"),
        ({"a": entry("F32", [1] * 65, 0, 4)}, 4, "too many dimensions"),
        ({"a": entry("F32", [1], 8, 12)}, 4, "truncated"),
        ({"a": entry("F32", [2**40], 0, 2**42)}, 8, "truncated"),
        ({"a": entry("F32", [-1], 0, 8)}, 8, "malformed"),
        ({"a": entry("F32", [2], -8, 0)}, 8, "malformed"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "malformed"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "malformed"),
        ({"a": entry("F99", [1], 4, 0)}, 4, "ends before it begins"),
        ({"a": 7}, 4, "malformed"),
        ([], 0, "not a JSON object"),
        (b"{nonsense", 0, "not valid JSON"),
        (b'{"a": 1, "a": 2}', 0, "appears twice"),
    ],
)
def test_an_unsound_file_is_refused(tmp_path: Path, header: object, data: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"(?s){words}") as caught:
        read_header(write(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:5],
        lambda raw: raw[:100],
        lambda raw: struct.pack("<Q", 1 << 60) + raw[8:],
        lambda raw: struct.pack("<Q", 200_000_000) + raw[8:],
    ],
)
def test_a_truncated_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    save_file(ARRAYS, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(damage((tmp_path / "x.safetensors").read_bytes()))
    with pytest.raises(CheckpointError, match="shorter than its header says"):
        read_header(tmp_path / "x.safetensors")


def test_a_type_without_use_is_refused_only_when_it_is_read(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "x.safetensors", {"a": entry("F8_E5M2", [4], 0, 4)}, 4))
    with pytest.raises(CheckpointError, match=r"type F8_E5M2 are not supported(.|\n)*x.safetensors: a"):
        read_rows(header["a"])


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    save_file({"a": ARRAYS["a"]}, tmp_path / "x.safetensors")
    tensor = read_header(tmp_path / "x.safetensors")["a"]
    with (tmp_path / "x.safetensors").open("rb+") as file:
        file.truncate(tensor.offset + 20)
    with pytest.raises(CheckpointError, match="became shorter"):
        read_rows(tensor)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read(.|\n)*absent"):
        read_header(tmp_path / "absent")
