"""Checks an Engine against its own hashes: every file is read once, SHA-256 by SHA-256.

Whether its numbers are the source's is the business of `compare/`.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

from ingot.engine import check_files, open_engine, read_manifest
from ingot.errors import REBUILD, EngineError
from ingot.manifest import Manifest

_BLOCK = 4 << 20  # bytes read at a time

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was checked: every part of `manifest`, `nbytes` in all."""

    directory: Path
    manifest: Manifest
    nbytes: int


def verify(directory: Path | str, progress: Progress | None = None) -> VerifyReport:
    """Check manifest, sizes, SHA-256 of every part, then the checksums and the plan of every target as at every open.

    Raises EngineError that names every part whose hash differs.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    total, done = sum(part.nbytes for part in manifest.parts), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress("checking hashes", done, total)

    wrong = [part for part in manifest.parts if _sha256(directory / part.name, advance) != part.sha256]
    if wrong:
        raise EngineError(
            "the engine is damaged: SHA-256 differs",
            where=", ".join(str(directory / part.name) for part in wrong),
            expected=", ".join(part.sha256 for part in wrong),
            hint="copy the engine again, or " + REBUILD,
        )
    for target in manifest.targets:
        open_engine(directory, target=target).close()
    return VerifyReport(directory=directory, manifest=manifest, nbytes=total)


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
