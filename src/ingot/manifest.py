"""The manifest of an Engine directory (`config.json`): what the engine is, and the checksums of everything beside it.

Its text is canonical: a manifest whose bytes differ in any way from what `Manifest.to_json` writes is refused, so
that even a changed space is found.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from ingot.chunks import Checksums
from ingot.configs.exact import Between, Like, read_exactly
from ingot.configs.read import parse_json, write_record
from ingot.errors import REBUILD, ConfigError, EngineError
from ingot.plan import Limits, Number
from ingot.plan_tiles import Name

ENGINE_SCHEMA = 6
MANIFEST_NAME = "config.json"
FORMAT = "ingot.engine"
DRAFT = "draft"  # the folder of an engine that holds the engine of its draft model

Fact = str | Number | float | bool | None
TokenId = Annotated[int, Between(0, (1 << 31) - 1)]
Word = Annotated[str, Like(r"[a-z0-9_-]*", "a word of small letters, or nothing")]
FileName = Annotated[str, Like(r"(?!\.{1,2}(/|$))[^/\0]+(/(?!\.{1,2}(/|$))[^/\0]+)*", "a file's name in the engine")]
Sha256 = Annotated[str, Like("[0-9a-f]{64}", "64 hexadecimal digits")]
Digest = Annotated[str, Like("([0-9a-f]{64})?", "64 hexadecimal digits, or nothing")]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part(Checksums):
    """One file of the engine directory, its name relative to that."""

    name: FileName
    sha256: Sha256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetEntry:
    """What an engine says about one of its targets.

    target        a name of the target list, e.g. "cpu/avx2"
    precision     of the weights
    program       SHA-256 of the steps and caches of one rank that has everything: engines of the same program and
                  Checkpoint compute the same bits, whatever their tp_size and pp_size
    built_with    compiler or library → its exact version, of what has made parts of the engine
    files         which rank files hold its plan and weights: "" is rank0.engine, "cuda" rank0.cuda.engine
    activation_errors  by product: relative error of its output where its inputs are int8, as measured at build; None
                  where it could not be measured. Only of products that had the choice
    weight_errors by quantised weight: what packing it has changed, root of the squared changes over that of the squares
                  of the Checkpoint's values; those that hold what is not a number are left out
    weight_sources  by weight that was quantised in the Checkpoint already: how, for people
    lost_codes    by matmul: why its codes in the Checkpoint are not kept, though `--precision auto` keeps codes
    verification  how the engine compared with its source (`ingot verify --against ... --store_results`); empty: never
    """

    target: Name
    precision: Name
    files: Word = ""
    program: Digest = ""
    built_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    activation_errors: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    weight_errors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    weight_sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lost_codes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verification: Mapping[str, Fact] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(TargetEntry):
    """What an engine says about itself: about its first target, and about `others`.

    others        further targets of the same engine
    model         plain facts for people (model_type, layers, hidden_size ...); nothing depends on them
    limits        as in every plan
    capabilities  what a session of this engine can do
    ranks         number of rank files of each target
    eos_ids       tokens that end a sequence
    checkpoint    SHA-256 of the graph of the Checkpoint and of the checksums of its weights
    sources       file → SHA-256 of what the engine's Checkpoint was made from; empty where that is not known
    """

    ingot_version: str
    model: Mapping[str, Fact]
    limits: Limits
    capabilities: tuple[str, ...]
    ranks: Annotated[int, Between(1, 1024)]
    eos_ids: tuple[TokenId, ...]
    bos_id: TokenId | None
    pad_id: TokenId | None
    parts: tuple[Part, ...]
    checkpoint: Digest = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: tuple[TargetEntry, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of all targets, in the order in which they were asked for."""
        return (self.target, *(other.target for other in self.others))

    def of(self, target: str) -> "Manifest":
        """This manifest as if the engine had no other target. Raises EngineError for one that it has not."""
        if target == self.target:
            return dataclasses.replace(self, others=())
        entry = next((other for other in self.others if other.target == target), None)
        if entry is None:
            raise EngineError(
                f"the engine has no target {target}",
                expected=", ".join(self.targets),
                got=target,
                hint="give one of these, or build the engine for it with --target",
            )
        return dataclasses.replace(self, others=(), **_fields(entry))

    def with_verification(self, target: str, verification: Mapping[str, Fact]) -> "Manifest":
        """This manifest with other results of one target."""
        if target == self.target:
            return dataclasses.replace(self, verification=verification)
        others = (dataclasses.replace(o, verification=verification) if o.target == target else o for o in self.others)
        return dataclasses.replace(self, others=tuple(others))

    def with_weight_errors(self, errors: Mapping[str, Mapping[str, float]]) -> "Manifest":
        """This manifest with what is known after packing. errors: by target."""
        others = (dataclasses.replace(each, weight_errors=errors[each.target]) for each in self.others)
        return dataclasses.replace(self, weight_errors=errors[self.target], others=tuple(others))

    def part(self, name: str) -> Part | None:
        """The part called `name`, if the engine has it."""
        return next((part for part in self.parts if part.name == name), None)

    def to_json(self) -> str:
        """Canonical text. `manifest_sha256` is the hash of this text with that field empty."""
        document = {"format": FORMAT, "schema_version": ENGINE_SCHEMA, "manifest_sha256": "", **write_record(self)}
        document["manifest_sha256"] = hashlib.sha256(_text(document).encode()).hexdigest()
        return _text(document)


def rank_file(rank: int, files: str = "") -> str:
    """Name of the engine file of one rank. files: as in `TargetEntry`."""
    return f"rank{rank}.{files}.engine" if files else f"rank{rank}.engine"


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Bytes of a config.json → Manifest. Raises EngineError with its own words for each kind of damage."""
    document = _document(data, where)
    schema = document.pop("schema_version", None)
    if type(schema) is not int or schema != ENGINE_SCHEMA:
        newer = type(schema) is int and schema > ENGINE_SCHEMA
        raise EngineError(
            "the engine was written by a newer ingot" if newer else "the engine's schema version cannot be read",
            where=f"{where}:schema_version",
            expected=str(ENGINE_SCHEMA),
            got=repr(schema)[:200],
            hint="update ingot, or " + REBUILD if newer else REBUILD,
        )
    found = document.pop("manifest_sha256", None)
    manifest = read_exactly(
        Manifest, document, what="the engine's manifest is damaged", where=where, error=EngineError, hint=REBUILD
    )
    text = manifest.to_json()
    if text.encode() != data:
        raise EngineError(
            "the engine's manifest does not match its own checksum",
            where=where,
            expected=f"manifest_sha256 {json.loads(text)['manifest_sha256']}, canonical spacing, no other fields",
            got=f"manifest_sha256 {found!r}"[:200],
            hint=REBUILD,
        )
    for what, wrong in _problems(manifest):
        raise EngineError("the engine's manifest is invalid", where=f"{where}:{what}", got=wrong, hint=REBUILD)
    return manifest


def _problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(where, what is wrong) of what no build writes."""
    yield from _twice("target", manifest.targets)
    names = [part.name for part in manifest.parts]
    yield from _twice("parts", names)
    if names != sorted(names) or MANIFEST_NAME in names:
        yield "parts", "they are not in the order of their names, or the manifest is one of them"
    for part in manifest.parts:
        if (problem := part.problem()) is not None:
            yield f"parts.{part.name}.crc32", problem
    targets = (manifest, *manifest.others)
    wanted = {rank_file(rank, each.files) for rank in range(manifest.ranks) for each in targets}
    found = {name for name in names if name.startswith("rank") and name.endswith(".engine")}
    if wanted != found:
        yield "parts", f"rank files {', '.join(sorted(found)) or 'none'}; its targets need {', '.join(sorted(wanted))}"


def _twice(what: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from ((what, f"{name} is there twice") for name, count in Counter(names).items() if count > 1)


def _fields(entry: TargetEntry) -> dict[str, Any]:
    return {field.name: getattr(entry, field.name) for field in dataclasses.fields(TargetEntry)}


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _document(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = parse_json(data, where)
    except ConfigError as error:
        got = "an empty file" if not data else error.got
        raise EngineError("the engine's manifest is not JSON", where=where, got=got, hint=REBUILD) from error
    if isinstance(document, dict) and document.get("format") == FORMAT:
        return {key: value for key, value in document.items() if key != "format"}
    raise EngineError(
        "the file is not the manifest of an engine",
        where=where,
        expected=f'"format": "{FORMAT}"',
        got=_guess(document),
        hint=_FIRST.get(_guess(document), REBUILD),
    )


_FIRST = {
    "a Checkpoint": "build an engine from it: ingot build --checkpoint_dir ... --output_dir ...",
    "the config.json of a Hugging Face model": "convert the model, then build it: ingot convert --model_dir ... "
    "--output_dir ...",
}


def _guess(document: object) -> str:
    if not isinstance(document, dict):
        return f"a JSON {type(document).__name__}"
    if "architectures" in document or "model_type" in document:
        return "the config.json of a Hugging Face model"
    if "schema_version" in document and "weights" in document:
        return "a Checkpoint"
    return f"a JSON object with format {document.get('format')!r}"[:200]
