"""The manifest of an Engine directory (`config.json`): what the engine is, and the checksums of everything beside it.

Its text is canonical: a manifest whose bytes differ in any way from what `Manifest.to_json` writes is refused, so
that even a changed space is found.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ingot.errors import EngineError
from ingot.plan import Limits

ENGINE_SCHEMA = 3
CHUNK_BYTES = 4 << 20  # every started 4 MiB of a part has its own crc32
MANIFEST_NAME = "config.json"
FORMAT = "ingot.engine"

REBUILD = "build the engine again with `ingot build --checkpoint_dir ... --output_dir ...`"

Fact = str | int | float | bool | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One file of the engine directory, its name relative to that.

    crc32  one value per started chunk of CHUNK_BYTES, zlib's polynomial
    """

    name: str
    nbytes: int
    sha256: str
    crc32: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What an engine says about one of its targets.

    target        a name of the target list, e.g. "cpu/avx2"
    precision     of the weights
    built_with    compiler or library → its exact version, of what has made parts of the engine
    files         which rank files hold its plan and weights: "" is rank0.engine, "cuda" rank0.cuda.engine
    activation_errors  by product: relative error of its output where its inputs are int8, as measured at build; None
                  where it could not be measured. Only of products that had the choice
    passport      how the engine compared with its source (`ingot verify --against ... --store_passport`); empty: never
    """

    target: str
    precision: str
    files: str = ""
    built_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    activation_errors: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    passport: Mapping[str, Fact] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Variant):
    """What an engine says about itself: about its first target, and about `others`.

    others        further targets of the same engine
    model         plain facts for people (model_type, layers, hidden_size ...); nothing depends on them
    limits        as in every plan
    capabilities  what a session of this engine can do
    ranks         number of rank files of each target
    eos_ids       tokens that end a sequence
    sources       file → SHA-256 of what the engine's Checkpoint was made from; empty where that is not known
    """

    ingot_version: str
    model: Mapping[str, Fact]
    limits: Limits
    capabilities: tuple[str, ...]
    ranks: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    parts: tuple[Part, ...]
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    others: tuple[Variant, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of all targets, in the order in which they were asked for."""
        return (self.target, *(other.target for other in self.others))

    def of(self, target: str) -> "Manifest":
        """This manifest as if the engine had no other target. Raises EngineError for one that it has not."""
        if target == self.target:
            return dataclasses.replace(self, others=())
        variant = next((other for other in self.others if other.target == target), None)
        if variant is None:
            raise EngineError("the engine has no such target", expected=", ".join(self.targets), got=target)
        return dataclasses.replace(self, others=(), **_fields(variant))

    def with_passport(self, target: str, passport: Mapping[str, Fact]) -> "Manifest":
        """This manifest with another passport of one target."""
        if target == self.target:
            return dataclasses.replace(self, passport=passport)
        others = (dataclasses.replace(o, passport=passport) if o.target == target else o for o in self.others)
        return dataclasses.replace(self, others=tuple(others))

    def part(self, name: str) -> Part | None:
        """The part called `name`, if the engine has it."""
        return next((part for part in self.parts if part.name == name), None)

    def to_json(self) -> str:
        """Canonical text. `manifest_sha256` is the hash of this text with that field empty."""
        document = {
            "format": FORMAT,
            "schema_version": ENGINE_SCHEMA,
            "manifest_sha256": "",
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            **_plain(self),
            "model": dict(self.model),
            "sources": dict(self.sources),
            "others": [_plain(other) for other in self.others],
            "limits": dataclasses.asdict(self.limits),
            "parts": [
                {**dataclasses.asdict(part), "crc32": "".join(f"{value:08x}" for value in part.crc32)}
                for part in self.parts
            ],
        }
        document["manifest_sha256"] = hashlib.sha256(_text(document).encode()).hexdigest()
        return _text(document)


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Bytes of a config.json → Manifest. Raises EngineError with its own words for each kind of damage."""
    document = _document(data, where)
    schema = document.get("schema_version")
    if schema != ENGINE_SCHEMA:
        newer = isinstance(schema, int) and schema > ENGINE_SCHEMA
        raise EngineError(
            "the engine was written by a newer ingot" if newer else "the engine's schema version cannot be read",
            where=f"{where}:schema_version", expected=str(ENGINE_SCHEMA), got=repr(schema),
            hint="update ingot, or " + REBUILD if newer else REBUILD,
        )  # fmt: skip
    try:
        manifest = _manifest_from(document)
        text = manifest.to_json()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError("the engine's manifest is damaged", where=where, got=repr(error), hint=REBUILD) from error
    if text.encode() != data:
        raise EngineError(
            "the engine's manifest does not match its own checksum", where=where,
            expected=f"manifest_sha256 {json.loads(text)['manifest_sha256']}, canonical spacing, no other fields",
            got=f"manifest_sha256 {document.get('manifest_sha256')}", hint=REBUILD,
        )  # fmt: skip
    return manifest


def _fields(variant: Variant) -> dict[str, Any]:
    return {field.name: getattr(variant, field.name) for field in dataclasses.fields(Variant)}


def _plain(variant: Variant) -> dict[str, Any]:
    """As JSON holds it."""
    fields = _fields(variant)
    maps = {name: dict(fields[name]) for name in ("passport", "activation_errors", "built_with")}
    return {**fields, **maps}


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _document(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        got = "an empty file" if not data else str(error)
        raise EngineError("the engine's manifest is not JSON", where=where, got=got, hint=REBUILD) from error
    if isinstance(document, dict) and document.get("format") == FORMAT:
        return document
    raise EngineError(
        "this is not the manifest of an engine", where=where, expected=f'"format": "{FORMAT}"',
        got=_guess(document), hint=REBUILD,
    )  # fmt: skip


def _guess(document: object) -> str:
    if not isinstance(document, dict):
        return f"a JSON {type(document).__name__}"
    if "architectures" in document or "model_type" in document:
        return "the config.json of a Hugging Face model (convert, then build it)"
    return f"a JSON object with format {document.get('format')!r}"


def _manifest_from(document: Mapping[str, Any]) -> Manifest:
    known = {field.name for field in dataclasses.fields(Manifest)}
    fields = {key: value for key, value in document.items() if key in known}
    others = tuple(Variant(**item) for item in document["others"])
    names = [document["target"], *(other.target for other in others)]
    if len(set(names)) < len(names):
        raise ValueError(f"a target is there twice: {', '.join(map(str, names))}")
    return Manifest(**{
        **fields,
        "others": others,
        "limits": Limits(**document["limits"]),
        "capabilities": tuple(document["capabilities"]),
        "eos_ids": tuple(document["eos_ids"]),
        "parts": tuple(_part_from(item) for item in document["parts"]),
    })  # fmt: skip


def _part_from(item: Mapping[str, Any]) -> Part:
    name, digits = item["name"], item["crc32"]
    steps = name.split("/")
    if name == MANIFEST_NAME or any(step in ("", ".", "..") for step in steps):
        raise ValueError(f"{name!r} cannot be the name of a part")
    if not isinstance(item["sha256"], str) or type(item["nbytes"]) is not int or item["nbytes"] < 0:
        raise ValueError(f"{name} has no hash, or no size")
    crc32 = tuple(int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
    return Part(**{**item, "crc32": crc32})
