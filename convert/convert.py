"""Hugging Face directory → Checkpoint, the main path.

    check the source, read its configuration, claim every tensor (conversion.py) → check memory and disk
    → stream the weights, a block at a time → write the Graph, config.json, tokenizer files → publish

Nothing appears at the output directory before the last step.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ingot import __version__
from ingot.checkpoint import CHECKPOINT_FILES, GRAPH_FILE, CheckpointConfig, companions, is_converted
from ingot.chunks import Checksums
from ingot.companions import TOKENIZER_FILE, check_companions, parse_tokenizer, tokenizer_memory
from ingot.configs.convert import ConvertOptions
from ingot.configs.model import ModelConfig
from ingot.convert.conversion import Conversion, Weight, conversion_from_directory, conversion_from_seed
from ingot.convert.decoder import build_graph
from ingot.convert.ranks import check_ranks
from ingot.convert.source import sha256
from ingot.convert.weights import Bits
from ingot.dtypes import DType, count_nonfinite, from_float32, to_float32
from ingot.output_dir import OutputDir
from ingot.resource_estimate import ResourceEstimate
from ingot.tensor_file import StoredTensor, TensorFileWriter

# What the process needs beside weights: interpreter, numpy, onnx, and the copies of one block.
BASE_MEMORY = 112 << 20  # bytes
TENSOR_MEMORY = 8 << 10  # bytes: what is known of one tensor, its nodes in the Graph

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What a conversion did.

    nbytes    bytes of weights written
    warnings  one sentence each: NaN or infinite weights, configuration keys without effect
    """

    output_dir: Path
    model: ModelConfig
    tensors: int
    nbytes: int
    seconds: float
    warnings: tuple[str, ...]


def convert(
    options: ConvertOptions, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> ConvertReport:
    """Write a Checkpoint. say: gets the estimate of memory and disk before the work starts.

    Raises UsageError (the output directory, more ranks than the model can have), CheckpointError, ConfigError or
    UnsupportedModelError (the source), CapacityError (memory, disk). Then, as after Ctrl-C, no output is left behind.
    """
    begin = time.monotonic()
    if options.model_dir is not None:
        conversion = conversion_from_directory(options.model_dir, options)
    else:
        assert options.config is not None, "ConvertOptions has one of the two"
        assert options.random_weights is not None, "ConvertOptions has a seed with every config"
        conversion = conversion_from_seed(options.config, options.random_weights, options)
    check_ranks(conversion.model, options.build_defaults)
    estimate = _resource_estimate(conversion, options.output_dir)
    if say is not None:
        say(f"the conversion {estimate}")
    estimate.check_memory(options.max_mem)
    if conversion.companions is not None:
        check_companions(conversion.companions)
    if conversion.tokenizer is not None:
        parse_tokenizer(json.dumps(conversion.tokenizer), f"the {TOKENIZER_FILE} made from the source's files")
    with OutputDir(options.output_dir, is_previous=is_converted, parts=CHECKPOINT_FILES, say=say) as out:
        out.require_space(estimate.disk)
        writer = _WeightWriter(_stage(progress, "weights", conversion.nbytes))
        for name, weights in conversion.files.items():
            writer.write_file(out.path / name, weights)
        graph = build_graph(conversion.model, writer.tensors, conversion.quantised)
        (out.path / GRAPH_FILE).write_bytes(graph.SerializeToString())
        _write_companions(conversion, out.path)
        hashed = _stage(progress, "hashing", sum(file.stat().st_size for file in conversion.read_files))
        config = CheckpointConfig(
            ingot_version=__version__,
            model=conversion.model,
            sources={_name(file, conversion): sha256(file, hashed) for file in conversion.read_files},
            weights=writer.sums,
            nonfinite=writer.nonfinite,
            random_seed=options.random_weights,
            build_defaults=options.build_defaults,
            quantised={name: weight.kind for name, weight in conversion.quantised.items()},
        )
        (out.path / "config.json").write_text(config.to_json(), encoding="utf-8")
    return ConvertReport(
        output_dir=options.output_dir,
        model=conversion.model,
        tensors=len(writer.tensors),
        nbytes=conversion.nbytes,
        seconds=time.monotonic() - begin,
        warnings=(*conversion.warnings, *writer.warnings),
    )


def _stage(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """A function that takes the bytes done since its last call, and tells the caller of the conversion."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(what, done, total)

    return advance


class _WeightWriter:
    """Streams weights into files, rounds them where asked, and looks at every value on the way.

    tensors    weight → where its bits lie now
    sums       file → its checksums
    nonfinite  weight → how many of its written values are NaN or infinite
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self.tensors: dict[str, StoredTensor] = {}
        self.sums: dict[str, Checksums] = {}
        self.nonfinite: dict[str, int] = {}
        self.warnings: list[str] = []

    def write_file(self, path: Path, weights: Sequence[Weight]) -> None:
        with TensorFileWriter(path, [weight.spec for weight in weights]) as file:
            for weight in weights:
                self._write(file, weight)
        self.tensors.update(file.tensors)
        self.sums[path.name] = file.sums()

    def _write(self, file: TensorFileWriter, weight: Weight) -> None:
        before = after = 0
        for bits in weight.read():
            written = _rounded(bits, weight.stored, weight.spec.dtype)
            found = count_nonfinite(written, weight.spec.dtype)
            before += found if written is bits else count_nonfinite(bits, weight.stored)
            after += found
            file.write(written)
            self._advance(written.nbytes)
        if before:
            self.warnings.append(f"{weight.spec.name}: {before:,} values are NaN or infinite")
        if after > before:
            self.warnings.append(
                f"{weight.spec.name}: {after - before:,} values are too large for {weight.spec.dtype.value}"
                " and became infinite"
            )
        if after:
            self.nonfinite[weight.spec.name] = after


def _rounded(bits: Bits, stored: DType, wanted: DType) -> Bits:
    if stored is wanted:
        return bits
    with np.errstate(over="ignore", invalid="ignore"):  # counted, and reported by name
        return from_float32(to_float32(bits, stored), wanted)


def _resource_estimate(conversion: Conversion, target: Path) -> ResourceEstimate:
    weights = [weight for file in conversion.files.values() for weight in file]
    carried = tokenizer = 0
    if conversion.companions is not None:
        tokenizer = tokenizer_memory(conversion.companions)
        carried = sum((conversion.companions / name).stat().st_size for name in companions(conversion.companions))
    known = TENSOR_MEMORY * len(weights)
    largest = max(tokenizer, *(weight.memory for weight in weights))
    return ResourceEstimate.at(target, memory=BASE_MEMORY + known + largest, disk=conversion.nbytes + known + carried)


def _write_companions(conversion: Conversion, folder: Path) -> None:
    """Tokenizer and generation files: copied, so that links to elsewhere become files; a tokenizer.json made where
    only older files describe the tokenizer."""
    if conversion.tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(conversion.tokenizer, ensure_ascii=False), encoding="utf-8")
    if conversion.settings:
        (folder / "tokenizer_config.json").write_text(
            json.dumps(conversion.settings, indent=2) + "\n", encoding="utf-8"
        )
    if conversion.companions is not None:
        for name in companions(conversion.companions):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(conversion.companions / name, folder / name)
    generation = folder / "generation_config.json"
    if conversion.generation and not generation.exists():
        generation.write_text(json.dumps(conversion.generation, indent=2) + "\n", encoding="utf-8")


def _name(file: Path, conversion: Conversion) -> str:
    """How a source file is called in the record of hashes."""
    beside = conversion.companions
    return file.relative_to(beside).as_posix() if beside is not None and file.is_relative_to(beside) else file.name
