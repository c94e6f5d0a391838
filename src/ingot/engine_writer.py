"""Writes an Engine directory: streams plan, weights and files to disk and hashes on the way.

Memory stays at one block. A full disk surfaces as OSError, which `OutputDir` puts into words.
"""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ingot.chunks import CHUNK_BYTES, Summer
from ingot.engine import HEADER_BYTES, SECTION_ALIGNMENT, Header, aligned, read_manifest
from ingot.manifest import ENGINE_SCHEMA, MANIFEST_NAME, Fact, Manifest, Part, rank_file
from ingot.plan import Plan, plans_to_json

Block = tuple[int, memoryview]  # offset in the weights section, bytes


class _PartWriter:
    """Writes one file from front to back, hashing as it goes."""

    def __init__(self, path: Path, name: str) -> None:
        self._name, self._file = name, path.open("xb")
        self._sha256, self._sums = hashlib.sha256(), Summer()

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._sha256.update(view)
        self._sums.update(view)

    def pad_to(self, position: int) -> None:
        """Zeros up to `position`."""
        assert position >= self._sums.nbytes, f"{self._name} would be written backwards at {position}"
        while self._sums.nbytes < position:
            self.write(bytes(min(position - self._sums.nbytes, CHUNK_BYTES)))

    def finish(self) -> Part:
        """Flush to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sums = self._sums.finish()
        return Part(name=self._name, sha256=self._sha256.hexdigest(), nbytes=sums.nbytes, crc32=sums.crc32)

    def abandon(self) -> None:
        """Close without a word: an error is already on its way."""
        with contextlib.suppress(OSError):  # closing flushes, and a full disk fails again
            self._file.close()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """What goes into one rank file: the plans of targets whose weights lie alike, and these weights.

    rank    whose it is
    files   as in `Variant`
    blocks  of the weights section, with ascending offsets; gaps become zeros
    """

    plans: Mapping[str, Plan]
    blocks: Iterable[Block]
    files: str = ""
    rank: int = 0


def write_engine(
    directory: Path,
    manifest: Manifest,
    ranks: Sequence[RankFile],
    files: Sequence[Path] = (),
    source: Path | None = None,
    made: Mapping[str, bytes] | None = None,
    finish: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    inside: Sequence[Path] = (),
) -> Manifest:
    """Fill a new `directory` with an engine.

    manifest  everything but `parts`, which is made here
    finish    adds what is known when all blocks have been made
    files     tokenizer and generation files to copy
    source    the folder to which they keep their relative paths; None: only their names are kept
    made      further files by name, e.g. what another compiler made
    inside    files that are there already, and belong to the engine
    Memory stays at one block.
    """
    parts = [_write_rank(directory, content, manifest.ranks) for content in ranks]
    for path in files:
        name = path.name if source is None else path.relative_to(source).as_posix()
        parts.append(_write_part(directory, name, _read_blocks(path)))
    parts += [_write_part(directory, name, [data]) for name, data in (made or {}).items()]
    parts += [_part_of(path, path.relative_to(directory).as_posix()) for path in inside]
    complete = dataclasses.replace(finish(manifest), parts=tuple(sorted(parts, key=lambda part: part.name)))
    _write_part(directory, MANIFEST_NAME, [complete.to_json().encode()])
    return complete


def store_verification(directory: Path, target: str, verification: Mapping[str, Fact]) -> Manifest:
    """Store what `ingot verify` found of a target. The manifest is replaced at once, by one that is on the disk."""
    manifest = read_manifest(directory).with_verification(target, verification)
    fresh = directory / f".{MANIFEST_NAME}.partial"
    with fresh.open("wb") as file:
        file.write(manifest.to_json().encode())
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(directory / MANIFEST_NAME)
    return manifest


def _write_rank(directory: Path, content: RankFile, ranks: int) -> Part:
    text = plans_to_json(content.plans).encode()
    start = aligned(HEADER_BYTES + len(text), SECTION_ALIGNMENT)
    (nbytes,) = {plan.weight_bytes for plan in content.plans.values()}
    header = Header(
        schema=ENGINE_SCHEMA,
        rank=content.rank,
        ranks=ranks,
        file_bytes=start + nbytes,
        plan_offset=HEADER_BYTES,
        plan_bytes=len(text),
        weights_offset=start,
        weights_bytes=nbytes,
    )

    def pieces(writer: _PartWriter) -> None:
        writer.write(header.pack())
        writer.write(text)
        writer.pad_to(start)
        for offset, data in content.blocks:
            writer.pad_to(start + offset)
            writer.write(data)
        writer.pad_to(start + nbytes)

    return _written(directory, rank_file(content.rank, content.files), pieces)


def _write_part(directory: Path, name: str, blocks: Iterable[bytes]) -> Part:
    def pieces(writer: _PartWriter) -> None:
        for block in blocks:
            writer.write(block)

    return _written(directory, name, pieces)


def _written(directory: Path, name: str, fill: Callable[[_PartWriter], None]) -> Part:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    writer = _PartWriter(path, name)
    try:
        fill(writer)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _part_of(path: Path, name: str) -> Part:
    """A file that is complete."""
    sha256, sums = hashlib.sha256(), Summer()
    for block in _read_blocks(path):
        sha256.update(block)
        sums.update(memoryview(block))
    counted = sums.finish()
    return Part(name=name, sha256=sha256.hexdigest(), nbytes=counted.nbytes, crc32=counted.crc32)


def _read_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            yield block
