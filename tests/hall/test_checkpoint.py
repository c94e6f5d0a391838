"""Opening a Checkpoint: only what is complete and of this schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.checkpoint import Checkpoint, CheckpointConfig, is_checkpoint
from ingot.configs.convert import BuildDefaults, ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.errors import CheckpointError, ConfigError
from ingot.tensor_file import read_rows
from tests.handmade import TINY_LLAMA, random_tensors, write_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    defaults = BuildDefaults(tp_size=2)
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m"), output_dir=tmp_path / "c", build_defaults=defaults))
    return tmp_path / "c"


def rewrite(checkpoint: Path, **values: object) -> None:
    document = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**document, **values}))


def test_everything_comes_back(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    assert opened.config.model is not None
    assert opened.config.model.head_dim == 12
    assert opened.config.build_defaults == BuildDefaults(tp_size=2)
    assert set(opened.config.sources) == {"config.json", "model.safetensors"}
    assert opened.graph_path.is_file()
    stored = opened.tensors()["layers.1/attn/q/weight"]
    original = random_tensors(TINY_LLAMA)["model.layers.1.self_attn.q_proj.weight"][1]
    np.testing.assert_array_equal(read_rows(stored, 3, 9), original[3:9])
    assert [str(name) for name in opened.companions()] == ["generation_config.json"]


def test_schema_version_and_checksums_are_enough(checkpoint: Path) -> None:
    document = json.loads((checkpoint / "config.json").read_text())
    few = {key: document[key] for key in ("schema_version", "weights")}
    (checkpoint / "config.json").write_text(json.dumps(few))
    found = Checkpoint.open(checkpoint).config
    assert found == CheckpointConfig(weights=found.weights)
    assert found.weights["model.safetensors"].nbytes == (checkpoint / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"schema_version": 3, "format": "ingot.engine"}, CheckpointError, "is an Engine, not a Checkpoint"),
        (
            {"schema_version": 1},
            CheckpointError,
            "another version of ingot(.|\n)*expected: 2(.|\n)*got: 1(.|\n)*convert the model",
        ),
        ({"weights": None}, CheckpointError, "no checksums of its weights(.|\n)*convert the model again"),
        ({"weights": {}}, CheckpointError, "no checksums of its weights"),
        ({"weights": []}, CheckpointError, "no checksums of its weights"),
        ({"weights": {"x": {"nbytes": -1, "crc32": ""}}}, CheckpointError, r"weights\.x:nbytes(.|\n)*a whole number"),
        ({"weights": {"x": {"nbytes": 9, "crc32": "xyz"}}}, CheckpointError, r"weights\.x:crc32(.|\n)*8 hexadecimal"),
        ({"weights": {"x": {"nbytes": 9, "crc32": ""}}}, CheckpointError, r"weights\.x(.|\n)*0 checksums for the 1"),
        ({"weights": {"x": {"nbytes": 0, "crc32": "00000000"}}}, CheckpointError, "1 checksums for the 0 chunks"),
        ({"schema_version": None}, CheckpointError, "not a Checkpoint"),
        ({"schema_version": "1"}, ConfigError, "whole number"),
        ({"sourcs": {}}, ConfigError, "unknown key(.|\n)*did you mean 'sources'"),
        ({"model": {"family": "llama"}}, ConfigError, "config.json:model.vocab_size"),
        ({"build_defaults": {"tp_siz": 1}}, ConfigError, "config.json:build_defaults.tp_siz(.|\n)*tp_size"),
    ],
)
def test_a_wrong_configuration_is_refused(
    checkpoint: Path, values: dict[str, object], error: type[Exception], words: str
) -> None:
    rewrite(checkpoint, **values)
    with pytest.raises(error, match=words):
        Checkpoint.open(checkpoint)


def test_a_hugging_face_directory_is_sent_to_convert(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a Checkpoint(.|\n)*ingot convert --model_dir"):
        Checkpoint.open(write_model(tmp_path / "m"))


def test_missing_parts_are_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such Checkpoint directory"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="this is a file: give a directory"):
        Checkpoint.open(checkpoint / "model.onnx")
    (checkpoint / "model.onnx").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.onnx"):
        Checkpoint.open(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint.open(checkpoint)


def test_external_data_is_found_or_refused(checkpoint: Path) -> None:
    opened = Checkpoint.open(checkpoint)
    stored = opened.tensors()["norm/weight"]
    place: dict[str, Any] = {"location": "model.safetensors", "offset": stored.offset, "dtype": DType.F32}
    found = opened.external("anything", shape=(32,), **place)
    np.testing.assert_array_equal(read_rows(found), read_rows(stored))
    with pytest.raises(CheckpointError, match=r"bytes that are not there(.|\n)*of [\d,]+ bytes"):
        opened.external("w", shape=(1 << 20,), **place)
    with pytest.raises(CheckpointError, match="no such file"):
        opened.external("w", location="x", offset=0, dtype=DType.F32, shape=(1,))
    (checkpoint / "x").write_bytes(bytes(4))
    with pytest.raises(CheckpointError, match=r"not the one that was converted(.|\n)*with checksums(.|\n)*got: x"):
        opened.external("w", location="x", offset=0, dtype=DType.F32, shape=(1,))
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b"!")
    with pytest.raises(CheckpointError, match=r"not the one that was converted(.|\n)*expected: [0-9,]+ bytes"):
        opened.external("w", shape=(32,), **place)
    with pytest.raises(CheckpointError, match=r"must lie in the Checkpoint itself(.|\n)*\.\./x"):
        opened.external("w", location="../x", offset=0, dtype=DType.F32, shape=(1,))


def test_a_name_in_two_files_is_refused(checkpoint: Path) -> None:
    (checkpoint / "more.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="two files hold a tensor of the same name"):
        Checkpoint.open(checkpoint).tensors()


def test_what_may_be_replaced(checkpoint: Path, tmp_path: Path) -> None:
    assert is_checkpoint(checkpoint)
    rewrite(checkpoint, schema_version=99)
    assert is_checkpoint(checkpoint)
    assert not is_checkpoint(tmp_path / "m")
    assert not is_checkpoint(tmp_path)
