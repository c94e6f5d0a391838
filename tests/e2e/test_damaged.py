"""Whatever is damaged, foreign, too large or interrupted is refused in its own words: exit 1, no traceback."""

import json
import os
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.dtypes import DType
from tests.e2e.command import finish, ingot, start
from tests.handmade import TINY_LLAMA, edit_header, random_tensors, write_model

RUN = ("--prompt", "x", "--max_output_len", "2")


@pytest.fixture
def engine(shipped_engine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(shipped_engine, tmp_path / "engine"))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def flip(path: Path, offset: int) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda engine: truncate(engine / "rank0.engine", 5_000_000), "is truncated"),
    "cut by one byte": (lambda engine: truncate(engine / "rank0.engine", _size(engine) - 1), "is truncated"),
    "longer": (lambda engine: truncate(engine / "rank0.engine", _size(engine) + 1), "longer than it was built"),
    "empty": (lambda engine: truncate(engine / "rank0.engine", 0), "is empty"),
    "no engine file": (lambda engine: (engine / "rank0.engine").unlink(), "is missing"),
    "flipped tokenizer": (lambda engine: flip(engine / "tokenizer.json", 1000), "damaged"),
    "no tokenizer": (lambda engine: (engine / "tokenizer.json").unlink(), "is missing"),
    "no manifest": (lambda engine: (engine / "config.json").unlink(), "has no manifest"),
    "empty manifest": (lambda engine: truncate(engine / "config.json", 0), "is not JSON"),
    "cut manifest": (lambda engine: truncate(engine / "config.json", 300), "is not JSON"),
    "foreign manifest": (lambda engine: (engine / "config.json").write_text('{"model_type": "llama"}'), "Hugging Face"),
    "newer schema": (
        lambda engine: edit_json(engine / "config.json", lambda manifest: manifest.update(schema_version=99)),
        "newer ingot",
    ),
    "changed limit": (
        lambda engine: edit_json(engine / "config.json", lambda manifest: manifest["limits"].update(max_batch_size=9)),
        "does not match its own checksum",
    ),
    "no directory": (lambda engine: shutil.rmtree(engine), "there is no engine directory"),
}


def _size(engine: Path) -> int:
    return (engine / "rank0.engine").stat().st_size


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_engine_is_refused(damage: str, engine: Path) -> None:
    spoil, words = DAMAGES[damage]
    spoil(engine)
    for command in (("run", "--engine_dir", engine, *RUN), ("verify", engine)):
        done = ingot(*command).fails(words, code=2 if damage == "no directory" else 1)
        assert "next:" in done.err


def test_one_flipped_bit_anywhere_is_found(engine: Path) -> None:
    file = engine / "rank0.engine"
    size = _size(engine)
    offsets = [0, 20, 4095, 4096, 30_000, 2_000_000, size // 2, size - 1]  # header, its padding, plan, padding, weights
    offsets += np.random.default_rng(5).integers(0, size, 8).tolist()
    for offset in offsets:
        flip(file, offset)
        ingot("run", "--engine_dir", engine, *RUN).fails("rank0.engine")
        flip(file, offset)
    ingot("run", "--engine_dir", engine, *RUN).succeeds()


def test_a_flipped_bit_of_the_manifest_is_found(engine: Path) -> None:
    size = (engine / "config.json").stat().st_size
    for offset in np.random.default_rng(6).integers(0, size, 12).tolist():
        flip(engine / "config.json", offset)
        ingot("verify", engine).fails()
        flip(engine / "config.json", offset)
    ingot("verify", engine).succeeds()


def test_an_engine_of_a_higher_isa_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    ingot(
        "build", "--checkpoint_dir", tiny_checkpoint, "--output_dir", tmp_path / "e", "--target", "cpu/amx"
    ).succeeds()
    done = ingot("run", "--engine_dir", tmp_path / "e", "--isa", "avx512", *RUN)
    done.fails("cpu/amx", "AMX", "rebuild")


def test_prompts_and_memory_beyond_the_limits(shipped_engine: Path) -> None:
    options = ("--engine_dir", shipped_engine, "--max_output_len", 2)
    ingot("run", *options, "--prompt", "word " * 600).fails("512")
    done = ingot("run", *options, "--prompt", "x", "--kv_cache_memory", "64KiB")
    done.fails("too small for one sequence", "expected: at least", "next:")
    assert done.err.startswith("error: the KV cache memory is too small"), "and nothing else is said"


SPOILED_MODELS: dict[str, tuple[dict[str, object], Callable[[Path], object], str]] = {
    "unknown model type": ({"model_type": "frobnicator"}, lambda model: None, "gpt2, gpt_bigcode, gpt_neo, gpt_neox"),
    "misshapen tensor": (
        {},
        lambda model: edit_header(model / "model.safetensors", {"model.norm.weight": {"shape": [16, 2]}}),
        "model.norm.weight",
    ),
    "config of another size": ({"hidden_size": 40}, lambda model: None, "expected"),
    "no weights": ({}, lambda model: (model / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": ({}, lambda model: truncate(model / "model.safetensors", 9000), "model.safetensors"),
    "empty weights": ({}, lambda model: truncate(model / "model.safetensors", 0), "model.safetensors"),
    "config is not JSON": ({}, lambda model: truncate(model / "config.json", 20), "config.json"),
}


@pytest.mark.parametrize("damage", SPOILED_MODELS)
def test_a_spoiled_model_is_refused(damage: str, tmp_path: Path) -> None:
    changes, spoil, words = SPOILED_MODELS[damage]
    model = write_model(tmp_path / "model", tensors=random_tensors(TINY_LLAMA))
    edit_json(model / "config.json", lambda config: config.update(changes))
    spoil(model)
    ingot("convert", "--model_dir", model, "--output_dir", tmp_path / "c").fails(words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "exl2", "bits": 4}}, ("not supported: EXL2", "in AWQ, GPTQ")),
        ({"model_type": "qwen9"}, ("'qwen9' are not supported", "did you mean")),
    ],
)
def test_a_model_is_refused_by_its_config_before_its_weights_are_there(
    changes: dict[str, object], words: tuple[str, ...], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}))
    convert = ("convert", "--model_dir", model, "--output_dir", tmp_path / "c")
    ingot(*convert).fails(*words)
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    ingot(*convert).fails("neither model.safetensors")


def test_missing_and_extra_tensors_are_listed(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    tensors["model.layers.0.self_attn.mystery.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    model = write_model(tmp_path / "model", tensors=tensors)
    done = ingot("convert", "--model_dir", model, "--output_dir", tmp_path / "c")
    done.fails("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.mystery.weight")
    assert not (tmp_path / "c").exists()


def test_nan_weights_are_counted_and_warned_about(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    dtype, bits = tensors["model.norm.weight"]
    assert dtype is DType.F32
    bits.reshape(-1)[[1, 5, 7]] = np.nan
    model = write_model(tmp_path / "model", tensors=tensors)
    converted = ingot("convert", "--model_dir", model, "--output_dir", tmp_path / "c").succeeds()
    assert "3 values are NaN or infinite" in converted.err
    built = ingot("build", "--checkpoint_dir", tmp_path / "c", "--output_dir", tmp_path / "e").succeeds()
    assert "warning: " in built.err
    assert "3 values that are NaN or infinite" in built.err


def test_a_damaged_checkpoint_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, spoil, words in (
        ("newer", lambda c: edit_json(c / "config.json", lambda config: config.update(schema_version=99)), "schema"),
        ("no graph", lambda c: (c / "model.onnx").unlink(), "no model.onnx"),
        ("cut graph", lambda c: truncate(c / "model.onnx", 200), "model.onnx"),
        ("cut weights", lambda c: truncate(c / "model.safetensors", 4000), "model.safetensors"),
    ):
        copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / name))
        spoil(copy)
        ingot("build", "--checkpoint_dir", copy, "--output_dir", tmp_path / "e").fails(words)
        assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(shipped_checkpoint: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    process = start("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", before=small_files)
    finish(process).fails("disk is full", "next:")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "words", "code"),
    [
        ("convert", signal.SIGTERM, "terminated", 143),
        ("build", signal.SIGINT, "interrupted", 130),
        pytest.param("convert", signal.SIGINT, "interrupted", 130, marks=pytest.mark.slow),
        pytest.param("build", signal.SIGTERM, "terminated", 143, marks=pytest.mark.slow),
    ],
)
def test_interrupted_work_leaves_nothing(
    command: str, number: int, words: str, code: int, large_checkpoint: Path, tmp_path: Path
) -> None:
    if command == "build":
        source: tuple[object, ...] = ("--checkpoint_dir", large_checkpoint, "--no_autotune")
    else:
        source = ("--config", large_checkpoint.with_name("config.json"), "--random_weights", 1)
    for attempt in range(5):  # on a busy machine the work may be done before the signal is sent
        process = start(command, *source, "--output_dir", tmp_path / str(attempt) / "out")
        while process.poll() is None and not list(tmp_path.glob("*/.out.partial-*/*")):
            time.sleep(0.001)
        os.kill(process.pid, number)
        if (result := finish(process)).code != 0:
            break
    result.fails(words, code=code)
    assert list((tmp_path / str(attempt)).iterdir()) == []


@pytest.mark.slow
def test_what_a_kill_left_is_removed_by_the_next_run(
    large_checkpoint: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    work = ("build", "--output_dir", tmp_path / "out", "--no_autotune", "--checkpoint_dir")
    process = start(*work, large_checkpoint)
    while process.poll() is None and not list(tmp_path.glob(".out.partial-*/*")):
        time.sleep(0.001)
    process.kill()
    process.communicate()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    ingot(*work, tiny_checkpoint).succeeds()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_the_header_length_of_safetensors_is_not_believed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    raw = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])
    ingot("convert", "--model_dir", model, "--output_dir", tmp_path / "c").fails("model.safetensors")
