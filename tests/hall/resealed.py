"""Changes the texts of an engine and makes every checksum and hash anew: only the contents are odd."""

import hashlib
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.chunks import CHUNK_BYTES
from ingot.engine import HEADER_BYTES, SECTION_ALIGNMENT, Header, aligned
from ingot.manifest import ENGINE_SCHEMA

Edit = Callable[[str], str]
_SEAL = re.compile(r'("manifest_sha256": ")[^"]*(")')


def edit_manifest(engine: Path, edit: Edit) -> None:
    """Change the text of config.json, in which manifest_sha256 is empty."""
    path = engine / "config.json"
    text = edit(_SEAL.sub(r"\1\2", path.read_text()))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    path.write_bytes(_SEAL.sub(rf"\g<1>{digest}\2", text).encode("utf-8", "surrogatepass"))


def edit_plans(engine: Path, edit: Edit, file: str = "rank0.engine") -> None:
    """Change the text of the plans in a rank file."""
    path = engine / file
    data = path.read_bytes()
    header = _header(data)
    text = edit(data[HEADER_BYTES : HEADER_BYTES + header.plan_bytes].decode()).encode("utf-8", "surrogatepass")
    weights, start = data[header.weights_offset :], aligned(HEADER_BYTES + len(text), SECTION_ALIGNMENT)
    fresh = Header(
        schema=ENGINE_SCHEMA,
        rank=header.rank,
        ranks=header.ranks,
        file_bytes=start + len(weights),
        plan_offset=HEADER_BYTES,
        plan_bytes=len(text),
        weights_offset=start,
        weights_bytes=len(weights),
    )
    path.write_bytes((fresh.pack() + text).ljust(start, b"\0") + weights)
    seal_part(engine, file)


def seal_part(engine: Path, name: str) -> None:
    """Give the manifest the size, hash and checksums that a part has now."""
    data = (engine / name).read_bytes()
    chunks = (data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES))
    found = {
        "crc32": "".join(f"{zlib.crc32(chunk):08x}" for chunk in chunks),
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }

    def change(manifest: dict[str, Any]) -> None:
        next(part for part in manifest["parts"] if part["name"] == name).update(found)

    edit_manifest(engine, in_manifest(change))


def in_manifest(change: Callable[[Any], object]) -> Edit:
    """An edit of the parsed manifest."""

    def edit(text: str) -> str:
        document = json.loads(text)
        change(document)
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    return edit


def in_plan(change: Callable[[Any], object]) -> Edit:
    """An edit of every parsed plan."""

    def edit(text: str) -> str:
        document = json.loads(text)
        for plan in document.values():
            change(plan)
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    return edit


def _header(data: bytes) -> Header:
    fields = [
        int.from_bytes(data[at : at + size], "little")
        for at, size in ((8, 4), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8), (56, 8))
    ]
    schema, rank, ranks, file_bytes, plan_offset, plan_bytes, weights_offset, weights_bytes = fields
    return Header(
        schema=schema,
        rank=rank,
        ranks=ranks,
        file_bytes=file_bytes,
        plan_offset=plan_offset,
        plan_bytes=plan_bytes,
        weights_offset=weights_offset,
        weights_bytes=weights_bytes,
    )
