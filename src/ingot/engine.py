"""The Engine file: maps a plan and its packed weights, and checks every byte. `engine_writer.py` writes it.

An engine directory holds `config.json` (the manifest), `rank0.engine`, and the tokenizer and generation files. Targets
whose weights lie alike share a rank file, which holds a plan for each; those of another layout are in a second one,
e.g. `rank0.cuda.engine`. All integers little-endian; every byte of every part, padding included, is covered by a crc32
per 4 MiB in the manifest.

    rank0.engine
    0        ┌───────────────────────────────────────────────┐
             │ 8  magic "INGOTENG"                           │
             │ 4  schema            4  header bytes (4096)   │  header, 4096 bytes,
             │ 4  rank              4  ranks                 │  the rest of it zeros
             │ 8  file bytes                                 │
             │ 8  plan offset       8  plan bytes            │
             │ 8  weights offset    8  weights bytes         │
    4096     ├───────────────────────────────────────────────┤
             │ plans by target (JSON, UTF-8)                 │
             ├───────────────────────────────────────────────┤
             │ zeros up to the next multiple of 2 MiB        │
    n*2 MiB  ├───────────────────────────────────────────────┤
             │ weights: every piece 64-byte aligned, thread  │
             │ slices on multiples of 2 MiB, zeros between   │
             └───────────────────────────────────────────────┘

Opening maps the file; the weights are used where they lie, or from a copy in 2 MiB pages (`weights_memory.py`), which
is made while the checksums are.
"""

import contextlib
import dataclasses
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.chunks import CHUNK_BYTES
from ingot.configs.read import parse_json
from ingot.errors import REBUILD, ConfigError, EngineError, MissingEngineError, spelled
from ingot.manifest import ENGINE_SCHEMA, FORMAT, MANIFEST_NAME, Manifest, Part, parse_manifest, rank_file
from ingot.plan import Plan
from ingot.plan_json import plan_from_document, plans_of_targets
from ingot.weights_memory import HUGE_PAGE, NumaPlacement, PlanPlacement, huge_pages

MAGIC = b"INGOTENG"
HEADER_BYTES = 4096
SECTION_ALIGNMENT = HUGE_PAGE  # of the weights section and of slices
_HEADER = struct.Struct("<8sIIIIQQQQQ")

Crc32 = Callable[[memoryview], int]
_Chunk = tuple[Part, int]
"""CHUNK_BYTES of a part, and which of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The fields at the start of a rank file, see the drawing above."""

    schema: int
    rank: int
    ranks: int
    file_bytes: int
    plan_offset: int
    plan_bytes: int
    weights_offset: int
    weights_bytes: int

    def pack(self) -> bytes:
        """The 4096 bytes of the header."""
        fields = _HEADER.pack(
            MAGIC,
            self.schema,
            HEADER_BYTES,
            self.rank,
            self.ranks,
            self.file_bytes,
            self.plan_offset,
            self.plan_bytes,
            self.weights_offset,
            self.weights_bytes,
        )
        return fields.ljust(HEADER_BYTES, b"\0")


@dataclasses.dataclass(kw_only=True, slots=True)
class Engine:
    """One target of an open engine. `weights` is the weights section and stays valid while the array lives.

    manifest  as if the engine had no other target
    """

    directory: Path
    manifest: Manifest
    plan: Plan
    weights: npt.NDArray[np.uint8]

    def close(self) -> None:
        """Forget the weights; their memory goes with the last array that looks into it."""
        self.weights = np.empty(0, np.uint8)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def aligned(offset: int, alignment: int) -> int:
    """The next multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """A file that the system does not let us read is an EngineError, too."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            "a file of the engine cannot be read",
            where=str(error.filename),
            got=error.strerror or str(error),
            hint="look at its permissions",
        ) from error


@_reading()
def open_engine(
    directory: Path | str,
    rank: int = 0,
    crc32: Crc32 | None = None,
    target: str | None = None,
    placement: PlanPlacement | None = None,
) -> Engine:
    """Check every byte of an engine in parallel, those of its other targets too, and load what one target needs.

    crc32   zlib.crc32 unless given; must release the GIL to be of use
    target  one of the engine's; None is the first
    placement   where to copy its weights; unless given, or where it says None, they are mapped
    Raises EngineError for whatever is missing, damaged, foreign or of another schema; CapacityError.
    """
    directory = Path(directory)
    whole = read_manifest(directory)
    manifest = whole.of(target or whole.target)
    own = _rank_part(directory, manifest, rank)
    check_files(directory, whole)
    views = {part.name: map_file(directory / part.name) for part in whole.parts}
    header = _read_header(views[own.name], directory / own.name, manifest, rank)
    check = _Check(directory, views, crc32 or zlib.crc32)
    first = -(-header.weights_offset // CHUNK_BYTES)  # chunk that holds nothing but weights
    chunks = [(part, index) for part in whole.parts for index in range(part.chunks)]
    check.mapped([(part, index) for part, index in chunks if part.name != own.name or index < first])
    plan = _plan(views[own.name], directory / own.name, header, whole, manifest)
    weights = np.frombuffer(views[own.name], np.uint8, header.weights_bytes, header.weights_offset)
    rest = [(own, index) for index in range(first, own.chunks)]
    if (chosen := placement and placement(plan)) is None:
        check.mapped(rest)
    else:
        mapped, weights = weights, huge_pages(header.weights_bytes)
        begin = first * CHUNK_BYTES - header.weights_offset
        weights[:begin] = mapped[:begin]
        check.copied(rest, weights, header.weights_offset, chosen)
        weights.flags.writeable = False
    return Engine(directory=directory, manifest=manifest, plan=plan, weights=weights)


def _rank_part(directory: Path, manifest: Manifest, rank: int) -> Part:
    part = manifest.part(rank_file(rank, manifest.files))
    if part is None:
        raise EngineError(
            f"the engine has no rank {rank}", where=str(directory), expected=f"0 to {manifest.ranks - 1}", got=str(rank)
        )
    return part


def _plan(view: memoryview, path: Path, header: Header, whole: Manifest, manifest: Manifest) -> Plan:
    """The plan of `manifest`'s target, sound, as the manifest of the whole engine says. The plans of the rank file's
    other targets must be there; they are read where they are run."""
    text = bytes(view[header.plan_offset : header.plan_offset + header.plan_bytes])
    try:
        plans = plans_of_targets(text.decode(), str(path))
    except UnicodeDecodeError as error:
        raise EngineError("the engine's plan is not readable", where=str(path), got=str(error), hint=REBUILD) from error
    wanted = {each.target for each in (whole, *whole.others) if each.files == manifest.files}
    if plans.keys() != wanted:
        raise EngineError(
            "the rank file does not hold the plans of its targets",
            where=str(path),
            expected=", ".join(sorted(wanted)),
            got=", ".join(sorted(plans)) or "none",
            hint="it is another engine's: copy the engine again, or build it again",
        )
    plan = plan_from_document(plans[manifest.target], f"{path}:{manifest.target}")
    for what, found in _contradictions(plan, header, whole):
        raise EngineError(
            "plan and manifest of the engine contradict each other",
            where=f"{path}:{manifest.target}.{what}",
            got=found,
            hint=REBUILD,
        )
    return plan


def _contradictions(plan: Plan, header: Header, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(what of the plan, how it differs from what header and manifest say)"""
    if plan.weight_bytes != header.weights_bytes:
        yield "weight_bytes", f"{plan.weight_bytes}, the header says {header.weights_bytes}"
    if plan.limits != manifest.limits:
        yield "limits", f"{plan.limits}, the manifest says {manifest.limits}"
    for name, ids in (("eos_ids", manifest.eos_ids), ("bos_id", (manifest.bos_id,))):
        if outside := [token for token in ids if token is not None and token >= plan.vocab_size]:
            yield "vocab_size", f"{plan.vocab_size}, but {name} of the manifest are {outside}"


@_reading()
def read_manifest(directory: Path | str) -> Manifest:
    """The manifest of an engine directory, checked against its own checksum."""
    directory = Path(directory)
    if not directory.is_dir():
        raise MissingEngineError("there is no engine directory", where=str(directory), hint=spelled(directory))
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise EngineError(
            "the engine has no manifest",
            where=str(path),
            expected=MANIFEST_NAME,
            hint=f"give the output directory of ingot build, or {REBUILD}",
        )
    return parse_manifest(path.read_bytes(), where=str(path))


def is_engine(directory: Path) -> bool:
    """Whether a directory is an output of `build`, however old or damaged: it may be replaced by a new one."""
    path = directory / MANIFEST_NAME
    try:
        document = parse_json(path.read_bytes(), str(path))
    except (OSError, ConfigError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


@_reading()
def read_plan(directory: Path | str, rank: int = 0, target: str | None = None) -> Plan:
    """The plan alone, for people to look at: checks the manifest, the sizes and the header, maps no weights."""
    directory = Path(directory)
    whole = read_manifest(directory)
    manifest = whole.of(target or whole.target)
    path = directory / _rank_part(directory, manifest, rank).name
    check_files(directory, whole)
    view = map_file(path)
    return _plan(view, path, _read_header(view, path, manifest, rank), whole, manifest)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Every part is there with its size, and nothing else is (names with a leading dot do not count)."""
    for part in manifest.parts:
        path = directory / part.name
        if not path.is_file():
            raise EngineError(
                "a file of the engine is missing", where=str(path), hint="copy the whole directory again, or " + REBUILD
            )
        size = path.stat().st_size
        if size != part.nbytes:
            what = "is empty" if size == 0 else "is truncated" if size < part.nbytes else "is longer than it was built"
            raise EngineError(
                f"a file of the engine {what}",
                where=str(path),
                expected=f"{part.nbytes} bytes",
                got=f"{size} bytes",
                hint="copy the whole directory again, or " + REBUILD,
            )
    known = {MANIFEST_NAME, *(part.name for part in manifest.parts)}
    found = (path.relative_to(directory) for path in directory.rglob("*") if not path.is_dir())
    foreign = sorted(path.as_posix() for path in found if path.as_posix() not in known and path.name[0] != ".")
    if foreign:
        raise EngineError(
            "the engine directory holds files that are not part of it",
            where=str(directory),
            expected="only what its manifest lists",
            got=", ".join(foreign),
            hint="move them elsewhere",
        )


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped read-only."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")  # nothing to map
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_header(view: memoryview, path: Path, manifest: Manifest, rank: int) -> Header:
    if len(view) < HEADER_BYTES or view[:8] != MAGIC:
        got = repr(bytes(view[:8]))
        raise EngineError(
            "the file is not an engine file of ingot", where=str(path), expected=repr(MAGIC), got=got, hint=REBUILD
        )
    _, schema, header_bytes, *fields = _HEADER.unpack_from(view)
    names = [field.name for field in dataclasses.fields(Header)][1:]
    header = Header(schema=schema, **dict(zip(names, fields, strict=True)))
    if schema != ENGINE_SCHEMA:
        raise EngineError(
            "the engine file was written by another version of ingot",
            where=str(path),
            expected=str(ENGINE_SCHEMA),
            got=str(schema),
            hint=REBUILD,
        )
    fits = (
        header_bytes == header.plan_offset == HEADER_BYTES
        and (header.rank, header.ranks) == (rank, manifest.ranks)
        and header.weights_offset == aligned(HEADER_BYTES + header.plan_bytes, SECTION_ALIGNMENT)
        and header.file_bytes == header.weights_offset + header.weights_bytes == len(view)
    )
    if not fits:
        raise EngineError("the header of the engine file is damaged", where=str(path), got=str(header), hint=REBUILD)
    return header


class _Check:
    """Checksums of the chunks of an engine's parts, in parallel."""

    def __init__(self, directory: Path, views: dict[str, memoryview], crc32: Crc32) -> None:
        self._directory = directory
        self._views = views
        self._crc32 = crc32

    def mapped(self, chunks: Sequence[_Chunk]) -> None:
        """Raises EngineError for the first that is damaged."""

        def damaged(chunk: _Chunk) -> bool:
            part, index = chunk
            view = self._views[part.name][index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            return self._crc32(view) != part.crc32_of(index)

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            for chunk, bad in zip(chunks, pool.map(damaged, chunks), strict=True):
                self._refuse(chunk, bad)

    def copied(
        self, chunks: Sequence[_Chunk], memory: npt.NDArray[np.uint8], offset: int, placement: NumaPlacement
    ) -> None:
        """`mapped`, of chunks that are read into `memory`, which begins at `offset` of the part, by cores near their
        placement. Reading spares the mapping of pages, and a chunk is in the cache when its checksum is made."""
        if not chunks:
            return
        view = memory.data

        def damaged(chunk: _Chunk) -> bool:
            part, index = chunk
            begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, part.nbytes)
            into = view[begin - offset : end - offset]
            done = 0
            while done < len(into) and (more := os.preadv(file.fileno(), [into[done:]], begin + done)):
                done += more
            return self._crc32(into) != part.crc32_of(index)

        with (self._directory / chunks[0][0].name).open("rb") as file, contextlib.ExitStack() as stack:
            pools = [stack.enter_context(_pool_on(cores)) for cores in placement.cores]
            node = [placement.node(index * CHUNK_BYTES - offset) for _, index in chunks]
            found = [pools[at].submit(damaged, chunk) for at, chunk in zip(node, chunks, strict=True)]
            try:
                for chunk, bad in zip(chunks, found, strict=True):
                    self._refuse(chunk, bad.result())
            except OSError as error:
                raise EngineError("a part of the engine cannot be read", where=file.name, got=str(error)) from error

    def _refuse(self, chunk: _Chunk, bad: bool) -> None:
        if not bad:
            return
        part, index = chunk
        begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, part.nbytes)
        raise EngineError(
            "a part of the engine is damaged: its checksum does not match",
            where=str(self._directory / part.name),
            expected=f"crc32 {part.crc32_of(index):08x} of bytes {begin} to {end}",
            hint="copy the whole directory again, or " + REBUILD,
        )


def _pool_on(cores: frozenset[int]) -> ThreadPoolExecutor:
    """As many threads as cores, which run on these alone."""

    def stay() -> None:
        with contextlib.suppress(OSError):  # where it is not allowed they run anywhere
            os.sched_setaffinity(0, cores)

    return ThreadPoolExecutor(max_workers=len(cores), initializer=stay)
