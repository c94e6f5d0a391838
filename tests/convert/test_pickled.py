"""pytorch_model.bin gives the Checkpoint that safetensors give; a pickle that asks for more than weights is refused."""

import collections
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.pickled import read_pickled
from ingot.convert.source import PICKLED_FILE, PICKLED_INDEX_FILE
from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import read_rows
from tests.handmade import TINY_LLAMA, random_tensors, write_model

TORCH = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


def state(dtype: DType = DType.F32) -> "collections.OrderedDict[str, torch.Tensor]":
    """The weights of a tiny model as torch has them, with the attribute that a model's state carries."""
    bits = random_tensors(TINY_LLAMA, dtype=dtype)
    tensors = collections.OrderedDict(
        (name, torch.from_numpy(value.view(np.uint8)).view(TORCH[dtype]).reshape(value.shape))
        for name, (_, value) in bits.items()
    )
    tensors._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return tensors


def write_pickled(folder: Path, tensors: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    torch.save(tensors, folder / PICKLED_FILE)
    return folder


def converted(folder: Path, target: Path) -> dict[str, np.ndarray]:
    convert(ConvertOptions(model_dir=folder, output_dir=target))
    return {name: read_rows(tensor) for name, tensor in Checkpoint.open(target).tensors().items()}


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_the_checkpoint_is_that_of_the_safetensors(tmp_path: Path, dtype: DType) -> None:
    found = converted(write_pickled(tmp_path / "m", state(dtype)), tmp_path / "c")
    expected = converted(write_model(tmp_path / "s", dtype=dtype), tmp_path / "e")
    assert found.keys() == expected.keys()
    for name, bits in expected.items():
        np.testing.assert_array_equal(found[name], bits)
    assert [file.name for file in (tmp_path / "c").glob("*.safetensors")] == ["model.safetensors"]
    assert set(Checkpoint.open(tmp_path / "c").config.sources) == {"config.json", PICKLED_FILE}


def test_shards(tmp_path: Path) -> None:
    folder, tensors = tmp_path / "m", state()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    files = {name: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: value for name, value in tensors.items() if files[name] == file}, folder / file)
    (folder / PICKLED_INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    found = converted(folder, tmp_path / "c")
    assert found.keys() == converted(write_model(tmp_path / "s"), tmp_path / "e").keys()
    assert sorted(file.name for file in (tmp_path / "c").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    os.truncate(folder / "pytorch_model-00002-of-00002.bin", 999)
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        converted(folder, tmp_path / "c2")


def test_views_parameters_and_shared_storages(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "whole": whole,
        "rows": whole[1:3],
        "same": whole,
        "cell": whole[2, 3],
        "parameter": torch.nn.Parameter(whole[3]),
        "columns": whole[:, 2:4],
        "empty": whole[:0],
    }
    torch.save(tensors, tmp_path / "x.bin")
    found = read_pickled(tmp_path / "x.bin")
    for name in set(tensors) - {"columns", "cell"}:
        np.testing.assert_array_equal(read_rows(found[name]), tensors[name].detach().numpy())
    assert read_rows(found["cell"]).item() == 15
    with pytest.raises(CheckpointError, match=r"type F32 with strides \(6, 1\) are not supported"):
        _ = found["columns"].dtype


class Attack:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, ("attacked",)  # type: ignore[return-value]


def rewritten(path: Path, member: str, edit: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The archive with one member changed and every member stored in `compression`."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, edit(data) if name.endswith(member) else data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": Attack()}, "asks for (posix|os).mkdir, which weights do not need"),
        ({"a": torch.nn.Linear(2, 2)}, "asks for torch.nn.modules.linear.Linear"),
        ({"state_dict": {"a": torch.ones(2)}}, "is not a tensor(.|\n)*state_dict(.|\n)*got: dict"),
        ({3: torch.ones(2)}, "is not a tensor"),
        ([torch.ones(2)], "holds a list"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
    ],
)
def test_what_is_more_than_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        converted(write_pickled(tmp_path / "m", content), tmp_path / "c")
    assert "save_pretrained" in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    for data, words in (
        (b"", "not a zip archive"),
        (pickle.dumps({"a": 1}), "not a zip archive"),
        (b"PK\3\4", "zip file"),
    ):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            read_pickled(file)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pickled(tmp_path / "absent.bin")
    for member, edit, compression, words in (
        ("data/0", lambda data: data[:-4], zipfile.ZIP_STORED, r"beyond its storage(.|\n)*24 bytes(.|\n)*20 bytes"),
        ("data/0", lambda data: data, zipfile.ZIP_DEFLATED, "is compressed"),
        ("data.pkl", lambda data: data[:20], zipfile.ZIP_STORED, "other than weights"),
        ("byteorder", lambda _: b"big", zipfile.ZIP_STORED, "little-endian"),
    ):
        torch.save({"data": torch.arange(6.0)}, file)
        rewritten(file, member, edit, compression)
        with pytest.raises(CheckpointError, match=words):
            read_pickled(file)
