"""The Checkpoint: what `convert` writes and `builder` reads.

    config.json         schema version, checksums of the weights; for people and tools: model, sources, build defaults
    model.onnx          the Graph; its initialisers point into the safetensors files
    *.safetensors       weights
    tokenizer.json, ... copied

The Graph is the only source of the builder: schema version and checksums are all that config.json must hold.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.chunks import CheckedFile, Checksums
from ingot.configs.convert import BuildDefaults
from ingot.configs.exact import read_exactly
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section, read_record, write_record
from ingot.dtypes import DType
from ingot.errors import CheckpointError, ConfigError, MissingModelError, spelled
from ingot.tensor_file import StoredTensor, read_header

CHECKPOINT_SCHEMA = 2
_AGAIN = "convert the model again with this version of ingot"
CALIBRATION = "calibration text"  # its name among the sources
GRAPH_FILE = "model.onnx"

# What a tokenizer or a generation loop may need; a pattern matches at most what it names.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
CHECKPOINT_FILES = ("config.json", GRAPH_FILE, "*.safetensors", *COMPANION_FILES)
"""Patterns of all that a Checkpoint consists of."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """config.json of a Checkpoint.

    weights          file name → checksums of the files that hold the weights; no other file's are used
    sources          file name → SHA-256 of the files it was made from; empty for random weights
    nonfinite        weight → how many of its values are NaN or infinite
    quantised        weight → format in which the source has it, of those that are quantised there
    losses           weight → relative error of its product's outputs on the calibration text, of those that ingot
                     quantised
    """

    ingot_version: str | None = None
    model: ModelConfig | None = None
    weights: Mapping[str, Checksums] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nonfinite: Mapping[str, int] = dataclasses.field(default_factory=dict)
    random_seed: int | None = None
    build_defaults: BuildDefaults = dataclasses.field(default_factory=BuildDefaults)
    quantised: Mapping[str, str] = dataclasses.field(default_factory=dict)
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        document: dict[str, Any] = {"schema_version": CHECKPOINT_SCHEMA, **write_record(self)}
        return json.dumps(document, indent=2) + "\n"

    @property
    def source_formats(self) -> tuple[str, ...]:
        """The formats of the source's quantised weights, the commonest first."""
        return tuple(kind for kind, _ in Counter(self.quantised.values()).most_common())

    @classmethod
    def from_file(cls, path: Path) -> "CheckpointConfig":
        """Raises CheckpointError for another schema, ConfigError for a key that is wrong or unknown."""
        section = Section.from_file(path)
        if not section.has("schema_version"):
            raise CheckpointError(
                "the directory is not a Checkpoint: its config.json has no schema_version",
                where=str(path.parent),
                hint="convert a Hugging Face directory first: ingot convert --model_dir ... --output_dir ..."
                if section.has("model_type")
                else "give the output directory of ingot convert",
            )
        if section.has("format"):
            raise CheckpointError(
                "the directory is an Engine, not a Checkpoint",
                where=str(path.parent),
                hint="give the Checkpoint that the Engine was built from",
            )
        schema = section.integer("schema_version")
        if schema != CHECKPOINT_SCHEMA:
            raise CheckpointError(
                "the Checkpoint was written by another version of ingot",
                where=section.place("schema_version"),
                expected=str(CHECKPOINT_SCHEMA),
                got=str(schema),
                hint=_AGAIN,
            )
        sources, nonfinite = section.section("sources"), section.section("nonfinite")
        quantised, losses = section.section("quantised"), section.section("losses")
        config = cls(
            ingot_version=section.text("ingot_version") if section.has("ingot_version") else None,
            model=read_record(ModelConfig, section.section("model")) if section.has("model") else None,
            weights=_weights(section),
            sources={name: sources.text(name) for name in sources.unread()},
            nonfinite={name: nonfinite.integer(name) for name in nonfinite.unread()},
            random_seed=section.integer("random_seed") if section.has("random_seed") else None,
            build_defaults=read_record(BuildDefaults, section.section("build_defaults")),
            quantised={name: quantised.text(name) for name in quantised.unread()},
            losses={name: losses.number(name) for name in losses.unread()},
        )
        section.refuse_unknown()
        return config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An opened Checkpoint directory; nothing but config.json is read until asked for."""

    path: Path
    config: CheckpointConfig

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Raises CheckpointError or ConfigError if `path` is not a Checkpoint of this schema."""
        if not path.is_dir():
            raise MissingModelError("there is no such Checkpoint directory", where=str(path), hint=spelled(path))
        if not (path / "config.json").is_file():
            raise CheckpointError(
                "the directory is not a Checkpoint: it has no config.json",
                where=str(path),
                hint="give the output directory of ingot convert",
            )
        config = CheckpointConfig.from_file(path / "config.json")
        if not (path / GRAPH_FILE).is_file():
            raise CheckpointError(
                f"the Checkpoint has no {GRAPH_FILE}", where=str(path), hint="convert the model again"
            )
        return cls(path=path, config=config)

    @property
    def graph_path(self) -> Path:
        return self.path / GRAPH_FILE

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of the safetensors files by name, from the headers alone."""
        found: dict[str, StoredTensor] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            for name, tensor in read_header(file).items():
                if name in found:
                    raise CheckpointError(
                        "two files hold a tensor of the same name", where=f"{file}: {name}", got=str(found[name].file)
                    )
                found[name] = tensor
        return found

    def external(self, name: str, *, location: str, offset: int, dtype: DType, shape: tuple[int, ...]) -> StoredTensor:
        """The bits that initialiser `name` of the Graph points to. Raises CheckpointError if they are not there."""
        where, file = f"{self.graph_path}: {name}", self.path / location
        if Path(location).name != location:
            raise CheckpointError(
                "external data must lie in the Checkpoint itself", where=where, expected="a file name", got=location
            )
        nbytes = math.prod(shape) * dtype.itemsize
        size = file.stat().st_size if file.is_file() else -1
        if offset < 0 or offset + nbytes > size:
            raise CheckpointError(
                "a weight of the graph points at bytes that are not there",
                where=where,
                expected=f"{location}: {nbytes:,} bytes at offset {offset:,}",
                got="no such file" if size < 0 else f"a file of {size:,} bytes",
                hint="convert the model again",
            )
        sums = self.config.weights.get(location)
        if sums is None or size != sums.nbytes:
            raise CheckpointError(
                "a weight file of the Checkpoint is not the one that was converted",
                where=where,
                expected="one of those with checksums in config.json" if sums is None else f"{sums.nbytes:,} bytes",
                got=location if sums is None else f"a file of {size:,} bytes: {location}",
                hint="copy the Checkpoint again, or convert the model again",
            )
        return StoredTensor(
            name=name, file=file, dtype_name=dtype.safetensors, shape=shape, offset=offset, nbytes=nbytes
        )

    def require_float(self, hint: str) -> None:
        """Raise CheckpointError if weights are codes already. hint: what to do then."""
        if self.config.quantised:
            raise CheckpointError(
                "the model is quantised already",
                where=str(self.path),
                got=", ".join(self.config.source_formats[:3]),
                hint=hint,
            )

    def open_weights(self, location: str) -> CheckedFile:
        """A file that `external` has found, whose bytes are checked as they are read."""
        return CheckedFile(self.path / location, self.config.weights[location])

    def companions(self) -> Iterator[Path]:
        """Tokenizer and generation files, which an Engine carries along; paths relative to the Checkpoint."""
        return companions(self.path)


def _weights(section: Section) -> dict[str, Checksums]:
    """Raises CheckpointError where there are none."""
    where, found = section.place("weights"), section.raw("weights")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            "the Checkpoint has no checksums of its weights", where=where, expected="file → nbytes, crc32", hint=_AGAIN
        )
    what = "the checksums of the Checkpoint cannot be read"
    weights = {
        name: read_exactly(Checksums, each, what=what, where=f"{where}.{name}", error=CheckpointError, hint=_AGAIN)
        for name, each in found.items()
    }
    for name, sums in weights.items():
        if (problem := sums.problem()) is not None:
            raise CheckpointError(what, where=f"{where}.{name}", got=problem, hint=_AGAIN)
    return weights


def companions(folder: Path) -> Iterator[Path]:
    """Tokenizer and generation files of a model directory, relative to it."""
    for pattern in COMPANION_FILES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                yield file.relative_to(folder)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a Checkpoint, of whatever schema."""
    return _sources(path) is not None


def is_converted(path: Path) -> bool:
    """Whether it is an output of `convert`, which a new one may replace."""
    sources = _sources(path)
    return sources is not None and CALIBRATION not in sources


def is_calibrated(path: Path) -> bool:
    """Whether it is an output of `quantize`, which a new one may replace."""
    return CALIBRATION in (_sources(path) or ())


def _sources(path: Path) -> Collection[str] | None:
    """Names of what a Checkpoint was made from; None where it is none."""
    try:
        config = Section.from_file(path / "config.json")
    except ConfigError:
        return None
    if not config.has("schema_version") or not (path / GRAPH_FILE).is_file():
        return None
    sources = config.raw("sources")
    return sources if isinstance(sources, dict) else ()
