"""A Hugging Face directory that is incomplete or damaged is refused, each in its own words."""

import json
from pathlib import Path

import pytest

from ingot.convert.source import INDEX_FILE, Source
from ingot.errors import CheckpointError, ConfigError, UnsupportedModelError
from tests.handmade import TINY_LLAMA, random_tensors, write_model, write_safetensors


def edit_index(folder: Path, **edits: str | None) -> None:
    """Tensor → file; None removes the tensor."""
    index = json.loads((folder / INDEX_FILE).read_text())
    weight_map = {**index["weight_map"], **edits}
    index["weight_map"] = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def test_single_and_sharded_are_the_same_model(tmp_path: Path) -> None:
    single = Source.open(write_model(tmp_path / "single"))
    sharded = Source.open(write_model(tmp_path / "sharded", shards=3, padding=5))
    assert set(single.tensors) == set(sharded.tensors) == set(random_tensors(TINY_LLAMA))
    assert [file.name for file in sharded.files] == [
        "config.json",
        "model.safetensors.index.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
    ]


def test_tokenizer_files_are_part_of_the_source(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    (folder / "README.md").write_text("x")
    names = {file.relative_to(folder).as_posix() for file in Source.open(folder).files}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/rag.jinja"}


def test_links_are_followed(tmp_path: Path) -> None:
    blob = write_model(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in blob.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert set(Source.open(tmp_path / "snapshot").tensors) == set(random_tensors(TINY_LLAMA))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m", shards=2)
    write_safetensors(tmp_path / "outside.safetensors", {})
    edit_index(folder, **{"model.norm.weight": name})
    with pytest.raises(CheckpointError, match=r"points outside its directory(.|\n)*model\.norm\.weight"):
        Source.open(folder)


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"files of the model are missing(.|\n)*1 missing: model-00002-of-00003"):
        Source.open(folder)


def test_index_and_headers_must_agree(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=2)
    edit_index(folder, extra="model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensors that the index lists(.|\n)*extra"):
        Source.open(folder)
    edit_index(folder, **{"extra": None, "model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"index does not place there(.|\n)*model\.norm\.weight"):
        Source.open(folder)


def test_an_empty_index_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", shards=2)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="names no tensors"):
        Source.open(folder)


def test_no_directory_no_config_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such model directory(.|\n)*download"):
        Source.open(tmp_path / "meta-llama" / "Llama-3.2-1B")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"this file is not a model(.|\n)*GGUF file"):
        Source.open(tmp_path / "weights.bin")
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json(.|\n)*an empty directory"):
        Source.open(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Source.open(tmp_path / "m")


@pytest.mark.parametrize("beside", [None, "config.json"])
def test_an_adapter_is_called_so(beside: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "o/base"}')
    if beside is not None:
        (tmp_path / beside).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"is a LoRA adapter(.|\n)*an adapter of o/base(.|\n)*as --lora"):
        Source.open(tmp_path)


def test_our_own_artifacts_are_no_source(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text('{"schema_version": 1}')
    with pytest.raises(CheckpointError, match="a Checkpoint or an Engine already"):
        Source.open(folder)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"not valid JSON(.|\n)*config\.json"):
        Source.open(folder)
