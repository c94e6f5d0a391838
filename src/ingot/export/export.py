"""Checkpoint → a GGUF file or a Hugging Face directory, the main path.

find every weight of the model (builder/stored_codes.py) → ask the format whether it holds its codes
→ write beside the target, block by block → read it back and compare the models → publish
"""

import dataclasses
import functools
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot import __version__
from ingot.builder.expressions import WeightReader
from ingot.builder.stored_codes import CheckpointWeight, CheckpointWeights
from ingot.checkpoint import COMPANION_FILES, Checkpoint
from ingot.configs.model import ModelConfig
from ingot.configs.read import read_object
from ingot.configs.token_ids import read_token_ids
from ingot.convert.family import read_model
from ingot.convert.gguf.header import read_gguf_header
from ingot.convert.gguf.source import open_gguf
from ingot.convert.weight_shapes import weight_shapes
from ingot.dtypes import DType
from ingot.errors import CapacityError, CheckpointError, ConfigError, UnsupportedModelError, UsageError
from ingot.export.compressed import compressed_problem, unsaid, write_compressed
from ingot.export.gguf_blocks import ROWS, block_kind, blocks_of, halves_problem
from ingot.export.gguf_file import FileTensor, Setting, write_gguf
from ingot.export.gguf_model import (
    FACTORS,
    architecture_of,
    as_written,
    gguf_settings,
    paired_rows,
    require_same,
    rope_factors,
    their_names,
)
from ingot.export.gguf_tokenizer import gguf_tokenizer
from ingot.export.hf_config import hf_config, hf_names
from ingot.output_dir import OutputDir

FORMATS = ("gguf", "compressed-tensors")
_MARK, _EXPORTED = "ingot_version", "exported by ingot"  # tell our own files from those of others
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "IQ4_NL": 25, "BF16": 32}  # general.file_type

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """kinds: type of tensors → how many there are. floats: weights whose codes became float32."""

    output: Path
    kinds: dict[str, int]
    floats: tuple[str, ...]
    nbytes: int


def export(
    checkpoint_dir: Path,
    output: Path,
    form: str,
    *,
    as_floats: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> ExportReport:
    """Write a file (gguf) or a directory (compressed-tensors), whole or not at all.

    as_floats: write a weight whose codes the format does not hold as float32 numbers; else it is refused.
    Raises UsageError, CheckpointError or UnsupportedModelError.
    """
    if form not in FORMATS:
        raise UsageError(f"unknown format {form!r:.40}", expected=", ".join(FORMATS), got=form)
    checkpoint = Checkpoint.open(checkpoint_dir)
    model = checkpoint.config.model
    if model is None:
        raise CheckpointError(
            "the Checkpoint does not say what model it is",
            where=f"{checkpoint_dir}/config.json: model",
            hint="convert the model again with this version of ingot",
        )
    if model.linear_in_out:
        raise UnsupportedModelError(
            f"{model.family} cannot be exported: it stores its matrices as [in, out]",
            where=str(checkpoint_dir),
            expected="a model whose matrices are [out, in], such as a llama",
            got=model.family,
        )
    with WeightReader(checkpoint) as reader:
        weights = CheckpointWeights(checkpoint, reader)
        found = {name: weights.find(name) for name in weight_shapes(model)}
        write = _to_gguf if form == "gguf" else _to_directory
        return write(checkpoint, model, found, output, as_floats, progress)


def _to_directory(
    checkpoint: Checkpoint,
    model: ModelConfig,
    weights: dict[str, CheckpointWeight],
    output: Path,
    as_floats: bool,
    progress: Progress,
) -> ExportReport:
    config, names = hf_config(model, checkpoint.path), hf_names(model)
    by_name, floats, kinds = {}, list[str](), dict[str, int]()
    for name, weight in weights.items():
        by_name[names[name]] = weight
        reason = weight.others if weight.codes is None else compressed_problem(weight.codes, weight.shape)
        if reason and not as_floats:
            raise unsaid(name, reason, "compressed-tensors")
        floats += [names[name]] if reason else []
        codes = None if reason else weight.codes
        coded = "" if codes is None else DType.F8.value if codes.floats else f"int{codes.bits}"
        kind = coded or (weight.dtype or DType.F32).value
        kinds[kind] = kinds.get(kind, 0) + 1
    total = sum(_nbytes(weight, names[name] in floats) for name, weight in weights.items())
    parts = ("config.json", "model.safetensors", *COMPANION_FILES)
    with OutputDir(output, is_previous=_is_export, parts=parts) as out:
        out.require_space(total)
        ids = {key: value for key, value in _ids(checkpoint).items() if value is not None}
        write_compressed(out.path, {**config, **ids, _MARK: __version__}, by_name, floats, _advancing(progress, total))
        for file in checkpoint.companions():
            (out.path / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(checkpoint.path / file, out.path / file)
    written = sum(each.stat().st_size for each in output.rglob("*") if each.is_file())
    return ExportReport(output=output, kinds=kinds, floats=tuple(floats), nbytes=written)


def _is_export(folder: Path) -> bool:
    """Whether an export wrote the directory; a model that was downloaded looks alike, and must stay."""
    try:
        return _MARK in read_object(folder / "config.json")
    except ConfigError:
        return False


def _ids(checkpoint: Checkpoint) -> dict[str, object]:
    ids = read_token_ids(checkpoint.path)
    eos: object = ids.eos[0] if len(ids.eos) == 1 else list(ids.eos) or None
    return {"bos_token_id": ids.bos, "eos_token_id": eos, "pad_token_id": ids.pad}


def _to_gguf(
    checkpoint: Checkpoint,
    model: ModelConfig,
    weights: dict[str, CheckpointWeight],
    output: Path,
    as_floats: bool,
    progress: Progress,
) -> ExportReport:
    if output.suffix != ".gguf" or output.is_dir():
        raise UsageError(
            "the output of a GGUF export is not a .gguf file", where=str(output), expected="a name that ends in .gguf"
        )
    if output.exists() and not _is_gguf_export(output):
        raise UsageError(
            "the output file exists, and ingot export has not written it",
            where=str(output),
            hint="choose another name, or delete the file",
        )
    name, architecture = architecture_of(model, checkpoint.path)
    theirs = their_names(architecture, model)
    tensors, floats = list[FileTensor](), list[str]()
    for ours, weight in weights.items():
        order = np.arange(_rows_of(weight))
        for part, heads in (("attn/q/", model.heads), ("attn/k/", model.kv_heads)):
            if architecture.paired and part in ours:
                order = paired_rows(heads, weight.shape[0])
        kind, reason = _gguf_kind(weight)
        if reason and not as_floats:
            raise unsaid(ours, reason, "gguf")
        floats += [ours] if reason else []
        if model.norm_offset and ours.endswith("norm/weight"):
            tensors.append(_grown(theirs[ours][0], weight, model.norm_offset))
            continue
        parts = order.reshape(-1, len(theirs[ours]), _height(weight) // len(theirs[ours]))
        for index, their_name in enumerate(theirs[ours]):  # of experts: gates, ups
            shape = (*weight.shape[:-2], parts.shape[2], weight.shape[-1]) if len(weight.shape) > 1 else weight.shape
            own = parts[:, index].reshape(-1)
            tensors.append(dataclasses.replace(_gguf_tensor(their_name, weight, kind, own), shape=shape))
    if (factors := rope_factors(model)) is not None:
        tensors.append(FileTensor(name=FACTORS, kind="F32", shape=factors.shape, read=lambda: iter([factors])))
    kinds: dict[str, int] = {}
    for each in tensors:
        kinds[each.kind] = kinds.get(each.kind, 0) + 1
    commonest = max((each for each in tensors if len(each.shape) > 1), key=lambda each: (kinds[each.kind], each.nbytes))
    settings: dict[str, Setting] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": checkpoint.path.resolve().name,
        "general.description": f"{_EXPORTED} {__version__}",
        "general.file_type": _FILE_TYPES[commonest.kind],
        "general.quantization_version": 2,
        **gguf_settings(model, name),
        **gguf_tokenizer(checkpoint.path, model.vocab_size),
    }
    total = sum(each.nbytes for each in tensors)
    _publish_gguf(output, settings, tensors, model, _advancing(progress, total), total)
    return ExportReport(output=output, kinds=kinds, floats=tuple(floats), nbytes=output.stat().st_size)


def _is_gguf_export(file: Path) -> bool:
    try:
        return str(read_gguf_header(file).settings.get("general.description")).startswith(_EXPORTED)
    except CheckpointError:
        return False


def _publish_gguf(
    output: Path,
    settings: dict[str, Setting],
    tensors: Sequence[FileTensor],
    model: ModelConfig,
    advance: Callable[[int], None],
    total: int,
) -> None:
    """The file appears under its name when it is whole, and says the same model."""
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if free < total:
        raise CapacityError(
            "there is not enough disk space for the export",
            where=str(output),
            expected=f"{total:,} bytes free",
            got=f"{free:,} bytes free",
            hint="free space or choose another disk",
        )
    part = output.with_name(f".{output.stem}.partial-{secrets.token_hex(3)}.gguf")
    try:
        write_gguf(part, settings, tensors, advance)
        source = open_gguf(part)
        _, back, _ = read_model(source.config, source.tensors)
        require_same(as_written(model), as_written(source.adapted(back)), "a GGUF file", output)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def _gguf_kind(weight: CheckpointWeight) -> tuple[str, str]:
    """(type, why its codes are not blocks)"""
    if weight.codes is None:
        if weight.dtype is None:
            return "F32", weight.others
        return (weight.dtype.safetensors if len(weight.shape) > 1 else "F32"), ""
    kind, reason = block_kind(weight.codes, weight.shape[-1])
    reason = reason or halves_problem(weight.codes, _rows_of(weight))
    return ("F32", reason) if reason else (kind, "")


def _rows_of(weight: CheckpointWeight) -> int:
    """All rows, those of all experts; numbers of a vector."""
    return math.prod(weight.shape[:-1]) if len(weight.shape) > 1 else weight.shape[0]


def _height(weight: CheckpointWeight) -> int:
    """Rows of one matrix; numbers of a vector."""
    return weight.shape[-2] if len(weight.shape) > 1 else weight.shape[0]


def _grown(name: str, weight: CheckpointWeight, offset: float) -> FileTensor:
    """A norm whose factor is the stored one and so much more."""

    def read() -> Iterator[npt.NDArray[np.generic]]:
        yield weight.read(0, weight.shape[0]).reshape(-1) + np.float32(offset)

    return FileTensor(name=name, kind="F32", shape=weight.shape, read=read)


def _gguf_tensor(name: str, weight: CheckpointWeight, kind: str, order: npt.NDArray[np.intp]) -> FileTensor:
    if weight.codes is not None and kind != "F32":
        return FileTensor(
            name=name, kind=kind, shape=weight.shape, read=functools.partial(blocks_of, weight.codes, kind, order)
        )
    stored = kind == (weight.dtype.safetensors if weight.dtype else "")
    read = functools.partial(_rows, weight.bits if stored else weight.read, order)
    return FileTensor(name=name, kind=kind, shape=weight.shape, read=read)


def _rows(
    read: Callable[[int, int], npt.NDArray[np.generic]], order: npt.NDArray[np.intp]
) -> Iterator[npt.NDArray[np.generic]]:
    """Rows in an order, some at a time."""
    for begin in range(0, len(order), ROWS):
        wanted = order[begin : begin + ROWS]
        low = int(wanted.min())
        yield read(low, int(wanted.max()) + 1)[wanted - low]


def _nbytes(weight: CheckpointWeight, as_float: bool) -> int:
    """About what a weight takes in a file."""
    count = math.prod(weight.shape)
    if weight.codes is None or as_float:
        return count * (weight.dtype or DType.F32).itemsize
    return count * weight.codes.bits // 8 + 4 * _rows_of(weight) * -(-weight.shape[-1] // weight.codes.group)


def _advancing(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("writing weights", min(done, total), total)

    return advance
