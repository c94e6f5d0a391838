"""A Hugging Face directory, checked before anything is read from it: config.json, weights, tokenizer files.

Links are followed (the Hugging Face cache is made of them); what is written later are copies, never links.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from ingot.checkpoint import COMPANION_FILES, companions
from ingot.configs.read import Section
from ingot.convert.pickled import read_pickled
from ingot.errors import CheckpointError, MissingModelError, UnsupportedModelError, spelled
from ingot.tensor_file import StoredTensor, read_header

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"

Reader = Callable[[Path], dict[str, StoredTensor]]
_LONGEST_NAME = 255  # characters: no file system has more
_HASH_BLOCK = 1 << 22  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An opened model directory.

    tensors  name → where its bits lie, over all files
    files    every file that the conversion reads or copies, for the record of hashes
    """

    path: Path
    config: Section
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: Path) -> "Source":
        """Raises CheckpointError or ConfigError if the directory is not a complete, sound model."""
        config = read_config(path)
        _check_entries(path)
        tensors, weight_files = _tensors(path)
        carried = [path / name for name in companions(path)]
        return cls(path=path, config=config, tensors=tensors, files=(path / CONFIG_FILE, *weight_files, *carried))


def read_config(path: Path) -> Section:
    """The config.json of a model directory, whose weights need not be there. Raises CheckpointError, ConfigError."""
    expected = "a Hugging Face directory with config.json and safetensors files, or a GGUF file"
    if path.is_file():
        raise CheckpointError("this file is not a model", where=str(path), expected=expected, hint="give another path")
    if not path.is_dir():
        raise MissingModelError(
            "there is no such model directory",
            where=str(path),
            expected=expected,
            hint=f"{spelled(path)}; --model_dir takes a local path, so download the model first",
        )
    if not (path / CONFIG_FILE).is_file():
        _refuse_adapter(path)
        raise CheckpointError(
            "the model directory has no config.json",
            where=str(path),
            got=_listing(path),
            hint="give a Hugging Face directory, and finish its download",
        )
    config = Section.from_file(path / CONFIG_FILE)
    if config.has("schema_version"):
        raise CheckpointError(
            "the model directory is a Checkpoint or an Engine already, not a Hugging Face directory",
            where=str(path),
            hint="give a Checkpoint to ingot build",
        )
    return config


def _refuse_adapter(path: Path) -> None:
    """Raises UnsupportedModelError for an adapter, which has no weights of a model."""
    if (path / ADAPTER_FILE).is_file():
        settings = Section.from_file(path / ADAPTER_FILE)
        kind, base = settings.text("peft_type", "LORA"), settings.text("base_model_name_or_path", "")
        raise UnsupportedModelError(
            f"the directory is a {'LoRA' if kind == 'LORA' else kind} adapter, not a model",
            where=str(path / ADAPTER_FILE),
            expected="a whole model: config.json, weights and tokenizer",
            got=f"an adapter of {base}" if base else "an adapter",
            hint="give its base model as --model_dir, and this directory as --lora",
        )


def _check_entries(path: Path) -> None:
    """A link that leads nowhere, or in circles, is a file that the model lost. Raises CheckpointError."""
    names = (SINGLE_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE, *COMPANION_FILES)
    for file in (path / name for name in names if "*" not in name):
        if (file.is_symlink() or file.exists()) and not file.is_file():
            raise CheckpointError(
                "a file of the model cannot be read",
                where=str(file),
                expected="a file",
                got="a directory or device" if file.exists() else "a link that leads nowhere, or in circles",
                hint="finish the download, or remove the entry",
            )


def _tensors(path: Path) -> tuple[dict[str, StoredTensor], list[Path]]:
    """All tensors, and the files that say where they are."""
    names = ((SINGLE_FILE, INDEX_FILE, read_header), (PICKLED_FILE, PICKLED_INDEX_FILE, read_pickled))
    for single_name, index_name, read in names:
        single, index = path / single_name, path / index_name
        if single.is_file():
            return read(single), [single]
        if index.is_file():
            shards = _shards(index)
            return _sharded(index, shards, read), [index, *sorted(set(shards.values()))]
    _refuse_adapter(path)
    raise CheckpointError(
        f"the model directory has neither {SINGLE_FILE} nor {INDEX_FILE}",
        where=str(path),
        expected=f"one of them, or {PICKLED_FILE}, or {PICKLED_INDEX_FILE}",
        got=_listing(path),
        hint="download the weights in one of these forms, or save the model: from_pretrained(...).save_pretrained(...)",
    )


def safetensors_name(file: Path) -> str:
    """What the file of a Checkpoint is called whose weights come from this one."""
    if file.suffix == ".gguf":
        return f"{file.stem}.safetensors"
    return file.name if file.suffix != ".bin" else f"{file.stem.replace('pytorch_model', 'model')}.safetensors"


def _shards(index: Path) -> dict[str, Path]:
    """Tensor name → file, from the index. Every file must be there, beside the index."""
    weight_map = Section.from_file(index).section("weight_map")
    names = {name: weight_map.text(name) for name in weight_map.unread()}
    if not names:
        raise CheckpointError("the index names no tensors", where=str(index), expected="weight_map")
    for tensor, file in names.items():
        if Path(file).name != file or file in ("", ".", "..") or len(file) > _LONGEST_NAME:
            raise CheckpointError(
                "the index points outside its directory",
                where=f"{index}: {tensor}",
                expected="a file name",
                got=repr(file)[:200],
            )
        if Path(file).suffix not in (".safetensors", ".bin"):
            raise CheckpointError(
                "the index names a file of another kind",
                where=f"{index}: {tensor}",
                expected="a .safetensors or .bin file",
                got=repr(file)[:200],
            )
    missing = sorted({file for file in names.values() if not (index.parent / file).is_file()})
    if missing:
        raise CheckpointError(
            "files of the model are missing",
            where=str(index.parent),
            expected=f"{len(set(names.values()))} files named in {index.name}",
            got=f"{len(missing)} missing: {', '.join(missing[:10])}",
            hint="finish the download",
        )
    return {tensor: index.parent / file for tensor, file in names.items()}


def _sharded(index: Path, shards: Mapping[str, Path], read: Reader) -> dict[str, StoredTensor]:
    """The tensors of all shards; index and headers must name the same ones in the same files."""
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(shards.values())):
        header = read(file)
        expected = {name for name, place in shards.items() if place == file}
        if absent := sorted(expected - set(header)):
            raise CheckpointError(
                "a file lacks tensors that the index lists for it", where=str(file), expected=", ".join(absent[:10])
            )
        if unlisted := sorted(set(header) - expected):
            raise CheckpointError(
                "a file holds tensors that the index does not place there",
                where=str(file),
                got=", ".join(unlisted[:10]),
                hint=f"repair {index.name} or download the model again",
            )
        tensors.update(header)
    return tensors


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "an empty directory"


def sha256(path: Path, advance: Callable[[int], None]) -> str:
    """Hex digest of a file; `advance` is told the bytes read since its last call."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
                advance(len(block))
    except OSError as error:
        raise CheckpointError("a file of the model cannot be read", where=str(path), got=error.strerror) from error
    return digest.hexdigest()
