"""GGUF files as sources: parts, directories, kinds that are not language models, scales that are no numbers."""

from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.header import read_gguf_header
from ingot.convert.gguf.source import is_gguf
from ingot.errors import CheckpointError, ConfigError, IngotError, MissingModelError, UnsupportedModelError
from tests import gguf_files as write
from tests.builder.engines import engine_logits
from tests.convert.gguf.test_architectures import CASES, assert_same, write_case
from tests.convert.gguf.test_blocks import HEAD_DIM, llama_settings, write_llama
from tests.convert.quantised.test_formats import reference
from tests.graph_logits import logits_of_graph


def stored(path: Path) -> dict[str, write.Stored]:
    """The tensors of a file, as they lie."""
    numbers = {"F32": 0, "F16": 1, "BF16": 30} | {name: n for n, (name, *_) in write.BLOCKS.items()}
    data = path.read_bytes()
    return {
        name: (numbers[each.type.name], each.shape, data[each.offset : each.offset + each.nbytes])
        for name, each in read_gguf_header(path).tensors.items()
    }


def in_parts(path: Path, folder: Path, count: int = 3, **more: int) -> Path:
    """A file again, as a model in parts; the first part."""
    header, tensors = read_gguf_header(path), list(stored(path).items())
    folder.mkdir()
    for number in range(count):
        settings: dict[str, object] = dict(header.settings) if number == 0 else {}
        settings |= {"split.no": number, "split.count": count, "split.tensors.count": len(tensors), **more}
        write.write_gguf(folder / f"m-{number + 1:05d}-of-{count:05d}.gguf", settings, dict(tensors[number::count]))
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_model_in_parts(tmp_path: Path) -> None:
    path, model = write_case(tmp_path, "llama", CASES["llama"])
    first = in_parts(path, tmp_path / "parts")
    assert_same(first, model, tmp_path / "a")
    assert_same(first.with_name("m-00002-of-00003.gguf"), model, tmp_path / "b")  # any part means the model
    assert_same(tmp_path / "parts", model, tmp_path / "c")
    assert len(Checkpoint.open(tmp_path / "c").config.sources) == 3


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    path, _ = write_case(tmp_path, "llama", CASES["llama"])
    first = in_parts(path, tmp_path / "wrong", **{"split.tensors.count": 5})
    with pytest.raises(CheckpointError, match=r"parts(.|\n)*do not fit(.|\n)*split.tensors.count"):
        convert(ConvertOptions(model_dir=first, output_dir=tmp_path / "checkpoint"))
    first = in_parts(path, tmp_path / "parts")
    (tmp_path / "parts" / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"1 missing: m-00003-of-00003\.gguf"):
        convert(ConvertOptions(model_dir=first, output_dir=tmp_path / "checkpoint"))


def test_a_part_of_none(tmp_path: Path) -> None:
    path, _ = write_case(tmp_path, "llama", CASES["llama"])
    wrong = path.rename(path.with_name("m-00001-of-00000.gguf"))
    with pytest.raises(CheckpointError, match="has no parts"):
        convert(ConvertOptions(model_dir=wrong, output_dir=tmp_path / "checkpoint"))


def test_a_directory(tmp_path: Path) -> None:
    """One model is taken, of several none; a directory with safetensors is not a GGUF model."""
    path, model = write_case(tmp_path, "qwen3", CASES["qwen3"])
    one = tmp_path / "one"
    one.mkdir()
    path.rename(one / "m.gguf")
    assert_same(one, model, tmp_path / "checkpoint")
    (one / "other.gguf").write_bytes((one / "m.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"several GGUF models(.|\n)*m.gguf, other.gguf"):
        convert(ConvertOptions(model_dir=one, output_dir=tmp_path / "again"))
    (tmp_path / "model" / "m.gguf").write_bytes(b"GGUF")
    assert not is_gguf(tmp_path / "model")
    with pytest.raises(MissingModelError, match=r"did you mean(.|\n)*m.gguf"):
        convert(ConvertOptions(model_dir=one / "n.gguf", output_dir=tmp_path / "again"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"general.architecture": "clip"}, "architecture 'clip'(.|\n)*llama"),
        ({"general.architecture": "bitnet"}, "architecture 'bitnet' are not read: (.|\n)*which activation"),
        ({"general.architecture": 3}, "not a language model"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "not a language model(.|\n)*adapter"),
        ({"general.architecture": "llama"}, "llama.block_count"),
        (llama_settings(32, 64), "no token table"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, settings: dict[str, object], words: str) -> None:
    path = write.write_gguf(tmp_path / "m.gguf", settings, {"a": write.floats(np.ones(3))})
    with pytest.raises((CheckpointError, ConfigError, UnsupportedModelError), match=words):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", [2, 12, 39])
def test_scales_that_are_no_numbers(tmp_path: Path, kind: int) -> None:
    write_llama(tmp_path, kind)
    tensors = stored(tmp_path / "model.gguf")
    number, shape, data = tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.ffn_up.weight"] = (number, shape, b"\xff\x7f" + data[2:])
    path = write.write_gguf(tmp_path / "bad.gguf", dict(read_gguf_header(tmp_path / "model.gguf").settings), tensors)
    with pytest.raises(CheckpointError, match=r"NaN or infinite(.|\n)*ffn_up") as caught:
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
    assert "blk.0.ffn_up.weight" in str(caught.value.where)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("factors", [np.ones(HEAD_DIM), np.full(HEAD_DIM // 2, np.nan), np.zeros(HEAD_DIM // 2)])
def test_factors_that_do_not_fit(tmp_path: Path, factors: np.ndarray) -> None:
    write_llama(tmp_path, 2)
    settings = dict(read_gguf_header(tmp_path / "model.gguf").settings)
    tensors = {**stored(tmp_path / "model.gguf"), "rope_freqs.weight": write.floats(factors)}
    path = write.write_gguf(tmp_path / "bad.gguf", settings, tensors)
    with pytest.raises(IngotError, match=r"rotary factors|factors of the rotary positions"):
        convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))


@pytest.mark.slow
@pytest.mark.shared
def test_files_that_other_programs_wrote(shared: Path, tmp_path: Path) -> None:
    """Each one's logits, as transformers has them with the weights that are meant."""
    folders = sorted((shared / "models" / "quantised").glob("gguf-*"))
    assert len(folders) == 3
    for folder in folders:
        convert(ConvertOptions(model_dir=folder / "model.gguf", output_dir=tmp_path / folder.name))
        ids, expected = reference(folder / "logits.safetensors")
        build(BuildConfig(target="ref", precision="f32"), tmp_path / folder.name, tmp_path / "engines" / folder.name)
        for got in (
            logits_of_graph(tmp_path / folder.name, ids),
            engine_logits(tmp_path / "engines" / folder.name, ids),
        ):
            assert np.abs(got - expected).max() < 5e-7 * np.ptp(expected), folder.name  # of the range: logits reach 170
