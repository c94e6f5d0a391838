"""GGUF files that are damaged, or made to harm, are refused in words before a weight is read."""

import functools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.header import read_gguf_header
from ingot.errors import CheckpointError, IngotError, UnsupportedModelError
from tests import gguf_files as write

TENSORS = {"a": write.floats(np.ones((3, 5), np.float32)), "b": write.floats(np.ones(7, np.float32))}
SETTINGS = {"general.architecture": "llama", "list": [1, 2, 3], "texts": ["x", "yy"], "half": 0.5, "yes": True}


def test_what_is_read(tmp_path: Path) -> None:
    path = write.write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS, version=2)
    header = read_gguf_header(path)
    assert dict(header.settings) == SETTINGS
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {"a": (3, 5), "b": (7,)}
    for tensor in header.tensors.values():
        assert tensor.offset % 32 == 0
        assert np.fromfile(path, np.float32, tensor.nbytes // 4, offset=tensor.offset).tolist() == [1.0] * (
            tensor.nbytes // 4
        )


def test_another_alignment(tmp_path: Path) -> None:
    settings = {"general.alignment": 128, **SETTINGS}
    header = read_gguf_header(write.write_gguf(tmp_path / "m.gguf", settings, TENSORS, alignment=128))
    assert all(tensor.offset % 128 == 0 for tensor in header.tensors.values())


@pytest.mark.parametrize(
    ("write_damaged", "words"),
    [
        (functools.partial(write.write_gguf, version=1), "of this version are not supported"),
        (functools.partial(write.write_gguf, version=9), "of this version are not supported"),
        (functools.partial(write.write_gguf, version=3 << 24), "big-endian"),
        (functools.partial(write.write_gguf, counts=(1 << 60, 5)), "too small for this many tensors"),
        (functools.partial(write.write_gguf, counts=(2, 1 << 40)), "too small for this many settings"),
        (functools.partial(write.write_gguf, counts=(1, 5)), "damaged"),
        (functools.partial(write.write_gguf, counts=(2, 4)), "damaged"),
        (functools.partial(write.write_gguf, counts=(2, 6)), "damaged"),
        (functools.partial(write.write_gguf, offsets=lambda places: [0, 0]), "overlaps"),
        (functools.partial(write.write_gguf, offsets=lambda places: [0, 96]), "hole|truncated"),
        (functools.partial(write.write_gguf, offsets=lambda places: [0, 1 << 62]), "truncated"),
        (functools.partial(write.write_gguf, offsets=lambda places: [64, 0]), "hole|overlaps|truncated"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, write_damaged: Callable[..., Path], words: str) -> None:
    path = write_damaged(tmp_path / "m.gguf", SETTINGS, TENSORS)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"general.alignment": 3}, "alignment"),
        ({"general.alignment": 0}, "alignment"),
        ({"general.alignment": "x"}, "alignment"),
        ({"general.alignment": 1 << 30}, "alignment"),
        ({"bad": b"\xff\xfe"}, "not UTF-8"),
        ({"long": "x" * (9 << 20)}, "too long"),
        ({"k" * (1 << 17): 1}, "too long"),
    ],
)
def test_settings_that_are_not_usable(tmp_path: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_gguf_header(write.write_gguf(tmp_path / "m.gguf", settings, TENSORS))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ((12, (3, 250), bytes(432)), "not whole blocks"),
        ((0, (1 << 40, 1 << 40), b""), "a wrong size"),
        ((0, (0, 3), b""), "a wrong size"),
        ((0, (1, 1, 1, 1, 1), bytes(4)), "dimensions"),
        ((15, (1, 256), bytes(292)), "Q8_K(.|\n)*Q4_K_M"),
        ((1000, (1, 256), bytes(66)), "type 1000"),
    ],
)
def test_tensors_that_are_not_read(tmp_path: Path, tensor: write.Stored, words: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        read_gguf_header(write.write_gguf(tmp_path / "m.gguf", SETTINGS, {"a": tensor}))


def raw(kind: int, data: bytes) -> bytes:
    """A file of one setting."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + write.text("key") + struct.pack("<I", kind) + data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (raw(9, struct.pack("<IQ", 8, 1 << 62)), "too small for this many items"),
        (raw(9, struct.pack("<IQ", 4, 1 << 30)), "too small for this many items"),
        (raw(9, struct.pack("<IQ", 9, 1)), "items of an unknown type"),
        (raw(77, b""), "unknown type"),
        (raw(8, struct.pack("<Q", 1 << 20) + b"x"), "ends within its header"),
        (raw(8, struct.pack("<Q", 1 << 63)), "too long"),
        (b"GGUF", "ends within"),
        (b"", "ends within"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (raw(9, struct.pack("<IQ", 8, 8_000_000) + bytes(64_000_000)), "too small for this many items"),
    ],
)
def test_bytes_that_are_no_header(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        read_gguf_header(tmp_path / "m.gguf")


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    whole = write.write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS).read_bytes()
    for end in range(len(whole) - 36):  # padding after the last tensor may be missing
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        with pytest.raises(IngotError):
            read_gguf_header(tmp_path / "cut.gguf")


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    path = write.write_gguf(tmp_path / "m.gguf", SETTINGS, TENSORS)
    path.write_bytes(path.read_bytes() + bytes(64))
    with pytest.raises(CheckpointError, match="belong to no tensor"):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
