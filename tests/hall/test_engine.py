"""The Engine file: what is written is read back; whatever is missing, foreign or damaged is refused in words."""

import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingot.chunks import CHUNK_BYTES
from ingot.dtypes import DType
from ingot.engine import HEADER_BYTES, SECTION_ALIGNMENT, is_engine, map_file, open_engine, read_plan
from ingot.engine_writer import RankFile, write_engine
from ingot.errors import EngineError
from ingot.manifest import ENGINE_SCHEMA, Manifest, parse_manifest
from ingot.plan import Buffer, CacheGroup, Extent, Input, Limits, Plan, Rows, Step, Weight, WeightSlice

LIMITS = Limits(max_batch_size=2, max_input_len=7, max_seq_len=8, max_num_tokens=4, max_logit_rows=4)
WEIGHT_BYTES = CHUNK_BYTES + 1000


def make_plan() -> Plan:
    weight = Weight(
        name="w",
        dtype=DType.F32,
        shape=(25,),
        layout="row",
        nbytes=100,
        pieces=(WeightSlice(begin=0, end=25, offset=64),),
    )
    inputs = ("w", "", "input_ids", "")
    step = Step(name="s", op="embedding", kernel="embedding.f32.ref", inputs=inputs, outputs=("b",), attrs={})
    return Plan(
        vocab_size=5,
        max_positions=7,
        limits=LIMITS,
        caches=(CacheGroup(layers=(0,), kv_heads=1, head_dim=4, tokens_per_block=16, dtype=DType.F32),),
        inputs=(Input(name="input_ids", dtype=DType.I32, extent=Extent.TOKENS),),
        buffers=(Buffer(name="b", rows=Rows.LOGITS, cols=5, offset=0),),
        weights=(weight,),
        steps=(step,),
        arena_bytes=128,
        weight_bytes=WEIGHT_BYTES,
        logits="b",
        draw_kernel="sample.f32.ref",
    )


def make_manifest() -> Manifest:
    return Manifest(
        ingot_version="0.1.0",
        model={"model_type": "tiny", "layers": 1},
        target="ref",
        precision="f32",
        limits=LIMITS,
        capabilities=("sampling",),
        ranks=1,
        eos_ids=(2,),
        bos_id=1,
        pad_id=None,
        parts=(),
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose weights section holds 100 bytes at 64, 8 bytes near its end, and zeros elsewhere."""
    return write_pristine(tmp_path_factory.mktemp("engine"))


def write_pristine(folder: Path) -> Path:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text('{"model": "tiny"}')
    directory = folder / "e"
    directory.mkdir()
    blocks = [(64, memoryview(bytes(range(100)))), (WEIGHT_BYTES - 20, memoryview(b"trailing"))]
    write_engine(directory, make_manifest(), [RankFile(plans={"ref": make_plan()}, blocks=blocks)], [tokenizer])
    return directory


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "engine"))


def test_every_byte_is_on_the_disk_when_the_engine_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `OutputDir` gives it its name."""
    flushed: dict[int, int] = {}

    def flush(file: int) -> None:
        flushed[os.fstat(file).st_ino] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", flush)
    files = [each.stat() for each in write_pristine(tmp_path).iterdir()]
    assert flushed == {each.st_ino: each.st_size for each in files}
    assert len(files) == 3


def test_round_trip(pristine: Path) -> None:
    with open_engine(pristine) as engine:
        assert engine.plan == make_plan() == read_plan(pristine)
        assert engine.manifest.model == {"model_type": "tiny", "layers": 1}
        expected = np.zeros(WEIGHT_BYTES, np.uint8)
        expected[64:164] = np.arange(100)
        expected[WEIGHT_BYTES - 20 : WEIGHT_BYTES - 12] = np.frombuffer(b"trailing", np.uint8)
        np.testing.assert_array_equal(engine.weights, expected)
        assert not engine.weights.flags.writeable
        assert engine.weights.ctypes.data % 64 == 0


def test_the_weights_section_is_aligned_in_the_file(pristine: Path) -> None:
    data = (pristine / "rank0.engine").read_bytes()
    assert data[:8] == b"INGOTENG"
    offset = data.index(bytes(range(100))) - 64
    assert offset % SECTION_ALIGNMENT == 0
    assert len(data) == offset + WEIGHT_BYTES


def test_writing_twice_gives_the_same_bytes(pristine: Path, tmp_path: Path) -> None:
    again = tmp_path / "e"
    again.mkdir()
    blocks = [(64, memoryview(bytes(range(100)))), (WEIGHT_BYTES - 20, memoryview(b"trailing"))]
    content = RankFile(plans={"ref": make_plan()}, blocks=blocks)
    write_engine(again, make_manifest(), [content], [pristine / "tokenizer.json"])
    for name in ("config.json", "rank0.engine", "tokenizer.json"):
        assert (again / name).read_bytes() == (pristine / name).read_bytes()


def test_the_injected_checksum_sees_every_byte(pristine: Path) -> None:
    seen = []

    def crc32(data: memoryview) -> int:
        seen.append(len(data))
        return zlib.crc32(data)

    open_engine(pristine, crc32=crc32)
    assert sum(seen) == (pristine / "rank0.engine").stat().st_size + (pristine / "tokenizer.json").stat().st_size
    with pytest.raises(EngineError, match="checksum does not match"):
        open_engine(pristine, crc32=lambda data: 0)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.slow
def test_any_flipped_byte_is_found(engine: Path) -> None:
    """Every byte of the manifest; of the other parts the edges of each region and a spread of others."""
    rank = engine / "rank0.engine"
    size = rank.stat().st_size
    start = size - WEIGHT_BYTES
    edges = [
        0,
        7,
        8,
        12,
        16,
        20,
        24,
        32,
        40,
        48,
        56,
        63,
        64,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        start - 1,
        start,
        start + 63,
        start + 64,
        start + 164,
        CHUNK_BYTES - 1,
        CHUNK_BYTES,
        size - 20,
        size - 1,
    ]
    spread = np.random.default_rng(0).integers(0, size, 12).tolist()
    for path, offsets in (
        (engine / "config.json", range((engine / "config.json").stat().st_size)),
        (engine / "tokenizer.json", range((engine / "tokenizer.json").stat().st_size)),
        (rank, [*edges, *spread]),
    ):
        for offset in offsets:
            flip(path, offset)
            with pytest.raises(EngineError):
                open_engine(engine)
            flip(path, offset)
    open_engine(engine)


def edit_manifest(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(engine: Path) -> None:
        path = engine / "config.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")

    return damage


def resize(name: str, size: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(engine: Path) -> None:
        with (engine / name).open("r+b") as file:
            file.truncate(size((engine / name).stat().st_size))

    return damage


def overwrite(offset: int, data: bytes) -> Callable[[Path], None]:
    def damage(engine: Path) -> None:
        with (engine / "rank0.engine").open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return damage


@pytest.mark.daily(23)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda engine: shutil.rmtree(engine), "there is no engine directory"),
        (lambda engine: (engine / "config.json").unlink(), "the engine has no manifest"),
        (lambda engine: (engine / "config.json").write_bytes(b""), "manifest is not JSON(.|\n)*an empty file"),
        (lambda engine: (engine / "config.json").write_bytes(b"\xff{"), "manifest is not JSON"),
        (lambda engine: (engine / "config.json").write_text("[]"), "not the manifest of an engine(.|\n)*a JSON list"),
        (lambda engine: (engine / "config.json").write_text('{"model_type": "llama"}'), "Hugging Face model"),
        (resize("config.json", lambda size: size // 2), "manifest is not JSON"),
        (resize("config.json", lambda size: size - 1), "does not match its own checksum"),
        (edit_manifest(lambda d: d.update(schema_version=ENGINE_SCHEMA + 1)), "written by a newer ingot"),
        (edit_manifest(lambda d: d.update(schema_version=0)), "schema version cannot be read"),
        (edit_manifest(lambda d: d.pop("schema_version")), "schema version cannot be read"),
        (edit_manifest(lambda d: d.update(target="cpu/amx")), "does not match its own checksum"),
        (edit_manifest(lambda d: d.update(unheard_of=1)), "manifest is damaged(.|\n)*unknown: unheard_of"),
        (edit_manifest(lambda d: d.update(parts=[])), "does not match its own checksum"),
        (edit_manifest(lambda d: d.pop("parts")), "manifest is damaged"),
        (lambda engine: (engine / "tokenizer.json").unlink(), "file of the engine is missing(.|\n)*tokenizer.json"),
        (lambda engine: (engine / "rank0.engine").unlink(), "file of the engine is missing(.|\n)*rank0.engine"),
        (resize("rank0.engine", lambda size: 0), "file of the engine is empty"),
        (resize("rank0.engine", lambda size: size - 1), "file of the engine is truncated"),
        (resize("tokenizer.json", lambda size: size + 1), "longer than it was built"),
        (lambda engine: (engine / "notes.txt").write_text("x"), "not part of it(.|\n)*notes.txt"),
        (overwrite(0, b"GGUF"), "not an engine file of ingot"),
        (overwrite(8, struct.pack("<I", ENGINE_SCHEMA + 1)), "another version of ingot"),
        (overwrite(24, struct.pack("<Q", 0)), "header of the engine file is damaged"),
        (overwrite(HEADER_BYTES - 1, b"x"), "checksum does not match(.|\n)*bytes 0 to"),
        (overwrite(CHUNK_BYTES, b"x"), f"checksum does not match(.|\n)*bytes {CHUNK_BYTES} to"),
    ],
)
def test_damage_is_refused_in_words(engine: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(engine)
    with pytest.raises(EngineError, match=words):
        open_engine(engine)


def test_a_rank_that_was_not_built_is_refused(pristine: Path) -> None:
    with pytest.raises(EngineError, match="has no rank"):
        open_engine(pristine, rank=1)


def test_a_rank_file_without_the_targets_plan_is_refused(tmp_path: Path) -> None:
    """As when a file of the same name and size comes from another engine."""
    write_engine(tmp_path, make_manifest(), [RankFile(plans={"cuda/sm90": make_plan()}, blocks=[])], [])
    with pytest.raises(
        EngineError, match=r"not hold the plans of its targets(.|\n)*expected: ref(.|\n)*got: cuda/sm90"
    ):
        read_plan(tmp_path)


def test_a_hidden_file_does_not_matter(engine: Path) -> None:
    (engine / ".DS_Store").write_text("x")
    open_engine(engine)


def test_a_part_may_not_leave_the_directory(pristine: Path) -> None:
    text = (pristine / "config.json").read_text().replace("tokenizer.json", "../../etc/passwd")
    with pytest.raises(EngineError, match="manifest is damaged"):
        parse_manifest(text.encode(), where="config.json")


def test_endless_nesting_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert not is_engine(tmp_path)
    with pytest.raises(EngineError, match="is not JSON"):
        open_engine(tmp_path)


def test_mapping_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert len(map_file(tmp_path / "empty")) == 0


def test_what_the_system_does_not_let_us_read_is_refused_in_words(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> memoryview:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("ingot.engine.map_file", denied)
        for read in (open_engine, read_plan):
            with pytest.raises(EngineError, match=r"rank0\.engine(.|\n)*Permission denied"):
                read(pristine)
    folder = Path(shutil.copytree(pristine, tmp_path / "e"))
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/mem")  # a file whose first byte nobody can read
    with pytest.raises(EngineError, match="cannot be read"):
        open_engine(folder)
