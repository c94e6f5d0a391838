"""The conversion as a whole: what it writes, what it warns about, and that failure leaves nothing."""

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.checkpoint import Checkpoint
from ingot.configs.convert import BuildDefaults, ConvertOptions
from ingot.convert import convert as convert_module
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.convert.source import Source
from ingot.dtypes import DType, bf16_to_float32, float32_to_bf16
from ingot.errors import CapacityError, CheckpointError, ConfigError, UsageError
from ingot.tensor_file import TensorFileWriter, read_rows
from tests.handmade import TINY_GPT2, TINY_LLAMA, Bits, random_tensors, write_model

Tensors = dict[str, tuple[DType, Bits]]


def converted(source: Path, target: Path, dtype: DType | None = None) -> Checkpoint:
    convert(ConvertOptions(model_dir=source, output_dir=target, dtype=dtype))
    return Checkpoint.open(target)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16], ids=str)
def test_bits_stay_as_they_are(tmp_path: Path, shards: int, dtype: DType) -> None:
    source = write_model(tmp_path / "m", TINY_GPT2, shards=shards, padding=3, dtype=dtype)
    tensors = converted(source, tmp_path / "c").tensors()
    original = random_tensors(TINY_GPT2, dtype=dtype)
    assert len(tensors) == len(original)
    assert len({tensor.file for tensor in tensors.values()}) == shards
    found = read_rows(tensors["layers.1/attn/qkv/weight"])
    np.testing.assert_array_equal(found, original["transformer.h.1.attn.c_attn.weight"][1])


def test_names_without_prefix(tmp_path: Path) -> None:
    tensors: Tensors = {name.removeprefix("transformer."): value for name, value in random_tensors(TINY_GPT2).items()}
    tensors["h.0.attn.bias"] = (DType.BOOL, np.ones((1, 1, 4, 4), dtype=np.bool_))
    tensors["h.1.attn.masked_bias"] = (DType.F32, np.array(-1e4, dtype=np.float32))
    stored = converted(write_model(tmp_path / "m", TINY_GPT2, tensors=tensors), tmp_path / "c").tensors()
    assert len(stored) == len(tensors) - 2


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_gpt_neox_has_two_names(tmp_path: Path, tied: bool) -> None:
    config = {**find_family("gpt_neox").tiny, "tie_word_embeddings": tied}
    tensors = random_tensors(config)
    found = tensors.pop("embed_out.weight", tensors["gpt_neox.embed_in.weight"])
    tensors["lm_head.weight"] = found
    stored = converted(write_model(tmp_path / "m", config, tensors=tensors), tmp_path / "c").tensors()
    assert ("lm_head/weight" in stored) is not tied


def test_rounding_is_to_nearest_even(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m")
    stored = converted(source, tmp_path / "c", DType.BF16).tensors()["layers.0/mlp/up/weight"]
    original = random_tensors(TINY_LLAMA)["model.layers.0.mlp.up_proj.weight"][1]
    assert stored.dtype is DType.BF16
    np.testing.assert_array_equal(read_rows(stored), float32_to_bf16(original.astype(np.float32)))


def test_large_tensors_stream_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.convert.conversion.BLOCK", 100)
    source = write_model(tmp_path / "m")
    sizes: list[int] = []
    write = TensorFileWriter.write

    def measured(file: TensorFileWriter, block: Bits) -> None:
        sizes.append(block.size)
        write(file, block)

    monkeypatch.setattr(TensorFileWriter, "write", measured)
    stored = converted(source, tmp_path / "c").tensors()
    assert max(sizes) == 100
    np.testing.assert_array_equal(
        read_rows(stored["embed/weight"]), random_tensors(TINY_LLAMA)["model.embed_tokens.weight"][1]
    )


TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'


def test_everything_about_the_source_is_recorded(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", shards=2)
    (source / "tokenizer.json").write_text(TOKENIZER)
    defaults = BuildDefaults(tp_size=2, pp_size=1, precision="w8")
    options = ConvertOptions(model_dir=source, output_dir=tmp_path / "c", build_defaults=defaults)
    report = convert(options)
    config = Checkpoint.open(tmp_path / "c").config
    assert config.sources == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(source.iterdir())
    }
    assert config.build_defaults == defaults
    assert config.model == report.model
    assert report.tensors == len(random_tensors(TINY_LLAMA))
    assert report.nbytes == sum(bits.nbytes for _, bits in random_tensors(TINY_LLAMA).values())
    assert report.warnings == ()


def test_companions_are_copied_never_linked(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m")
    (tmp_path / "blob").write_text(TOKENIZER)
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("template")
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    checkpoint = converted(source, tmp_path / "c").path
    assert (checkpoint / "tokenizer.json").read_text() == TOKENIZER
    assert not any(file.is_symlink() for file in checkpoint.rglob("*"))
    assert (checkpoint / "additional_chat_templates" / "rag.jinja").read_text() == "template"
    assert (checkpoint / "generation_config.json").read_text() == '{"eos_token_id": [7, 8]}'


def test_token_ids_of_the_configuration_become_a_generation_config(tmp_path: Path) -> None:
    checkpoint = converted(write_model(tmp_path / "m"), tmp_path / "c").path
    assert json.loads((checkpoint / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    convert(
        ConvertOptions(model_dir=write_model(tmp_path / "m"), output_dir=tmp_path / "c"),
        lambda what, done, total: calls.append((what, done, total)),
    )
    assert [what for what, _, _ in calls] == sorted((what for what, _, _ in calls), reverse=True)
    for stage in ("weights", "hashing"):
        done = [done for what, done, _ in calls if what == stage]
        assert done == sorted(done)
        assert {total for what, _, total in calls if what == stage} == {done[-1]}


def poisoned(name: str, **values: float) -> Tensors:
    tensors = random_tensors(TINY_LLAMA)
    tensors[name][1].reshape(-1)[: len(values)] = list(values.values())
    return tensors


def test_nan_and_infinite_weights_are_counted(tmp_path: Path) -> None:
    tensors = poisoned("model.layers.1.mlp.up_proj.weight", a=float("nan"), b=float("inf"), c=float("-inf"))
    source = write_model(tmp_path / "m", tensors=tensors)
    report = convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c"))
    assert report.warnings == ("layers.1/mlp/up/weight: 3 values are NaN or infinite",)
    assert Checkpoint.open(tmp_path / "c").config.nonfinite == {"layers.1/mlp/up/weight": 3}


def test_values_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", tensors=poisoned("model.norm.weight", a=float("nan"), b=1e6, c=-7e4))
    report = convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c", dtype=DType.F16))
    assert report.warnings == (
        "norm/weight: 1 values are NaN or infinite",
        "norm/weight: 2 values are too large for f16 and became infinite",
    )
    assert Checkpoint.open(tmp_path / "c").config.nonfinite == {"norm/weight": 3}


def test_keys_without_effect_are_a_warning(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {**TINY_LLAMA, "soft_cap": 3.0})
    report = convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c"))
    assert report.warnings == ("config.json: these keys have no effect: soft_cap",)


def test_a_tied_model_with_the_same_lm_head(tmp_path: Path) -> None:
    config = {**TINY_LLAMA, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    stored = converted(write_model(tmp_path / "m", config, tensors=tensors), tmp_path / "c").tensors()
    assert "lm_head/weight" not in stored
    tensors["lm_head.weight"] = (DType.F32, tensors["lm_head.weight"][1].astype(np.float32) * 2)
    write_model(tmp_path / "m", config, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"holds another lm_head(.|\n)*tie_word_embeddings"):
        converted(tmp_path / "m", tmp_path / "c2")


@pytest.mark.parametrize(
    ("missing", "extra", "words"),
    [
        (
            "model.norm.weight",
            None,
            "1 that the files lack: model.norm.weight(.|\n)*0 that config.json does not ask for: none",
        ),
        (
            None,
            "model.layers.2.mlp.up_proj.weight",
            "0 that the files lack: none(.|\n)*1 that config.json does not ask for: model.layers.2",
        ),
        (
            None,
            "model.layers.0.self_attn.q_proj.bias",
            "1 that config.json does not ask for: model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_missing_and_extra_tensors(tmp_path: Path, missing: str | None, extra: str | None, words: str) -> None:
    tensors = random_tensors(TINY_LLAMA)
    if missing:
        del tensors[missing]
    if extra:
        tensors[extra] = (DType.F32, np.zeros(3, dtype=np.float32))
    source = write_model(tmp_path / "m", tensors=tensors)
    with pytest.raises(CheckpointError, match=words):
        converted(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_bias_that_only_some_layers_have(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_GPT2)
    del tensors["transformer.h.1.attn.c_attn.bias"]
    with pytest.raises(CheckpointError, match=r"1 that the files lack: transformer\.h\.1\.attn\.c_attn\.bias"):
        converted(write_model(tmp_path / "m", TINY_GPT2, tensors=tensors), tmp_path / "c")


def test_a_misshapen_tensor(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", {**TINY_LLAMA, "vocab_size": 64}, tensors=random_tensors(TINY_LLAMA))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: expected \[64, 32\], got \[61, 32\]"):
        converted(source, tmp_path / "c")


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(TINY_LLAMA))

    def drawn(name: str, seed: int, dtype: DType | None = None) -> dict[str, np.ndarray]:
        options = ConvertOptions(
            config=tmp_path / "shape.json", random_weights=seed, output_dir=tmp_path / name, dtype=dtype
        )
        convert(options)
        tensors = Checkpoint.open(tmp_path / name).tensors()
        return {name: read_rows(tensor) for name, tensor in tensors.items()}

    first, again, other = drawn("a", 7), drawn("b", 7), drawn("c", 8)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embed/weight"], other["embed/weight"])
    table = bf16_to_float32(first["embed/weight"].astype(np.uint16))
    assert 0.018 < table.std() < 0.022
    np.testing.assert_array_equal(bf16_to_float32(first["norm/weight"].astype(np.uint16)), 1)
    assert drawn("d", 7, DType.F32)["embed/weight"].dtype == np.float32
    assert not np.array_equal(first["layers.0/mlp/up/weight"], first["layers.1/mlp/up/weight"])
    assert Checkpoint.open(tmp_path / "a").config.random_seed == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either --model_dir or --config"),
        ({"model_dir": Path("m"), "config": Path("c")}, "either --model_dir or --config"),
        ({"config": Path("c")}, "go together"),
        ({"model_dir": Path("m"), "random_weights": 1}, "go together"),
        ({"config": Path("c"), "random_weights": -1}, "not be negative"),
        ({"model_dir": Path("m"), "dtype": DType.I8}, "not a weight type"),
        ({"model_dir": Path("m"), "build_defaults": BuildDefaults(tp_size=0)}, "--tp_size must be at least 1"),
        ({"model_dir": Path("m"), "build_defaults": BuildDefaults(tp_size=3)}, "tp_size must be a power of two"),
        ({"model_dir": Path("m"), "build_defaults": BuildDefaults(pp_size=65)}, "--pp_size 65 is out of range"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ConvertOptions(output_dir=Path("out"), **options)


def test_too_little_memory_is_refused_ahead(tmp_path: Path) -> None:
    options = ConvertOptions(model_dir=write_model(tmp_path / "m"), output_dir=tmp_path / "c", max_mem=64 << 20)
    with pytest.raises(CapacityError, match=r"than --max_mem allows(.|\n)*64 MiB(.|\n)*--max_mem \d+MiB"):
        convert(options)
    assert not (tmp_path / "c").exists()


def test_too_little_disk_is_refused_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ConvertOptions(model_dir=write_model(tmp_path / "m"), output_dir=tmp_path / "c")
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 9999))
    monkeypatch.setattr(TensorFileWriter, "write", lambda *_: pytest.fail("a byte was written"))
    said: list[str] = []
    with pytest.raises(CapacityError, match=r"not enough disk space(.|\n)*9,999 bytes free"):
        convert(options, say=said.append)
    assert said[0].startswith("the conversion needs at most ")
    assert "9.765 KiB of disk are free" in said[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


class FullDisk:
    """Lets a number of blocks through, then fails as a full disk does."""

    def __init__(self, blocks: int, failure: BaseException) -> None:
        self.blocks, self.failure, self.write = blocks, failure, TensorFileWriter.write

    def __call__(self, file: TensorFileWriter, block: Bits) -> None:
        self.blocks -= 1
        if self.blocks < 0:
            raise self.failure
        self.write(file, block)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
)
@pytest.mark.parametrize("blocks", [0, 11])
def test_a_failed_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, expected: type[BaseException], blocks: int
) -> None:
    source = write_model(tmp_path / "m")
    disk = FullDisk(blocks, failure)
    monkeypatch.setattr(TensorFileWriter, "write", lambda self, block: disk(self, block))
    with pytest.raises(expected):
        convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_a_failed_run_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "m")
    before = converted(source, tmp_path / "c").config
    monkeypatch.setattr(convert_module, "build_graph", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c", dtype=DType.BF16))
    assert Checkpoint.open(tmp_path / "c").config == before
    monkeypatch.undo()
    assert converted(source, tmp_path / "c", DType.BF16).tensors()["norm/weight"].dtype is DType.BF16
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "m"]


def test_a_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m")
    with pytest.raises(UsageError, match="holds something else"):
        converted(source, source)
    assert Source.open(source).tensors


def test_a_config_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        convert(ConvertOptions(config=tmp_path / "absent.json", random_weights=1, output_dir=tmp_path / "c"))
