"""Engines for GPUs and CPUs at once, on the emulated GPU and without one: who runs what, and every reason why not."""

import ctypes
import dataclasses
import io
import json
import shutil
import struct
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.cli.console import CliConsole
from ingot.engine import open_engine, read_manifest
from ingot.errors import UsageError, install
from ingot.llm import LLM
from ingot.manifest import MANIFEST_NAME
from ingot.plugins.cpu.native import detect_isa
from ingot.plugins.cuda import compiler
from ingot.plugins.cuda import target as cuda_target
from ingot.plugins.cuda.plan_facts import code_weight
from ingot.plugins.registry import find_target
from ingot.plugins.target import WithMemory
from ingot.quickstart import SHIPPED
from tests.e2e.command import Result, ingot
from tests.handmade import TINY_LLAMA, write_model
from tests.runtime.server.served import serving_engine

PROMPT = ("--prompt", "Once upon a time", "--max_output_len", 6, "--temperature", 0)
BENCH = ("--input_len", 8, "--output_len", 3, "--repetitions", 1, "--warmup", 0, "--json")
TARGETS = "cpu/avx2,cuda/sm89,ref,cuda/sm90"
LIMITS = ("--max_seq_len", 64, "--max_batch_size", 4, "--tokens_per_block", 16, "--precision", "f32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the shipped model's tokenizer."""
    folder = tmp_path_factory.mktemp("several")
    model = write_model(folder / "model", {**TINY_LLAMA, "head_dim": 16, "vocab_size": 2560})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, model)
    ingot("convert", "--model_dir", model, "--output_dir", folder / "checkpoint").succeeds()
    return folder / "checkpoint"


@pytest.fixture
def engine(gpu: ctypes.CDLL, checkpoint: Path) -> Path:
    """Built once, with the emulated compiler."""
    folder = checkpoint.with_name("engine")
    if not folder.exists():
        build(checkpoint, folder, TARGETS).succeeds()
    return folder


def build(checkpoint: Path, out: Path, target: str, *options: object) -> Result:
    given = ("--checkpoint_dir", checkpoint, "--output_dir", out, "--target", target, *LIMITS, "--no_autotune")
    return ingot("build", *given, *options)


@pytest.mark.slow
def test_gpus_share_weights_and_each_has_its_code(engine: Path, checkpoint: Path, tmp_path: Path) -> None:
    manifest = read_manifest(engine)
    files = {name: manifest.of(name).files for name in manifest.targets}
    assert files == {"cpu/avx2": "", "cuda/sm89": "cuda", "ref": "", "cuda/sm90": "cuda"}
    assert sorted(path.name for path in engine.glob("*.engine")) == ["rank0.cuda.engine", "rank0.engine"]
    build(checkpoint, tmp_path / "one", "cuda/sm90").succeeds()
    alone = (tmp_path / "one" / "rank0.engine").stat().st_size
    inspected = json.loads(ingot("inspect", engine, "--json").succeeds().out)
    codes = {each["target"]: each["code"][0] for each in inspected["targets"] if "code" in each}
    together = (engine / "rank0.cuda.engine").read_bytes()
    assert len(together) - alone < codes["cuda/sm89"]["bytes"] + (2 << 20)
    for name, architecture in (("cuda/sm89", "sm_89"), ("cuda/sm90", "sm_90a")):
        with open_engine(engine, target=name) as opened:
            (piece,) = code_weight(opened.plan).pieces
            code = codes[name]
            assert code["architecture"] == architecture
            assert together[code["offset"] :][:4] == opened.weights[piece.offset :][:4].tobytes() == b"\x7fELF"
    assert codes["cuda/sm89"]["offset"] != codes["cuda/sm90"]["offset"]


@pytest.mark.slow
def test_codes_lie_once_for_cpus_and_gpus(gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "e"
    build(checkpoint, out, "cpu/avx2,cuda/sm90", "--precision", "w8", "--activations", "bf16").succeeds()
    manifest = read_manifest(out)
    assert {manifest.of(name).files for name in manifest.targets} == {""}
    ingot("run", "--engine_dir", out, *PROMPT, "--target", "cuda/sm90").succeeds()
    ingot("verify", out, "--target", "cuda/sm90", "--against", checkpoint).succeeds()


def test_damage_to_another_target_is_damage(engine: Path, tmp_path: Path, checkpoint: Path) -> None:
    """An engine is whole or it is refused, whichever target is to run."""
    copy = tmp_path / "engine"
    build(checkpoint, copy, "cpu/avx2,cuda/sm90").succeeds()
    with (copy / "rank0.cuda.engine").open("r+b") as file:
        file.seek(-1, io.SEEK_END)
        last = file.read(1)
        file.seek(-1, io.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    ingot("verify", copy).fails("SHA-256 differs", "rank0.cuda.engine")
    for target in ((), ("--target", "cpu")):
        ingot("run", "--engine_dir", copy, *PROMPT, *target).fails("checksum does not match", "rank0.cuda.engine")
    (copy / "rank0.cuda.engine").unlink()
    ingot("run", "--engine_dir", copy, *PROMPT, "--target", "cpu").fails("a file of the engine is missing")


@pytest.mark.slow
def test_every_machine_takes_what_fits(gpu: ctypes.CDLL, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of three kinds, then none; an ISA asks for the CPU."""
    taken = {}
    for capability in ("90", "89", "75", ""):
        monkeypatch.setenv("INGOT_EMULATED_SM", capability or "90")
        gpu.emulated_set_devices(1 if capability else 0)
        (state,) = json.loads(ingot("doctor", engine, "--json").succeeds().out)["engines"]
        taken[capability] = state["takes"]
        assert {line.split(" ")[0].rstrip(":") for line in state["why_not"]} <= set(TARGETS.split(","))
        assert not any("\n" in line for line in state["why_not"])
    cpu = "cpu/avx2" if detect_isa() != "none" else "ref"
    assert taken == {"90": "cuda/sm90", "89": "cuda/sm89", "75": cpu, "": cpu}
    gpu.emulated_set_devices(1)
    capped = ingot("run", "--engine_dir", engine, *PROMPT, "--isa", "avx2", "--target", "cuda")
    capped.fails("an ISA caps a CPU", code=2)
    assert "runs here as cuda/sm90" in ingot("doctor", engine).succeeds().out


@pytest.mark.slow
def test_commands_run_on_the_gpu_unchanged(engine: Path, checkpoint: Path) -> None:
    text = ingot("run", "--engine_dir", engine, *PROMPT).succeeds().out
    assert text == ingot("run", "--engine_dir", engine, *PROMPT, "--target", "ref").succeeds().out
    assert text.strip()
    for kind in (("latency",), ("throughput", "--num_requests", 3)):
        report = json.loads(ingot("bench", *kind, "--engine_dir", engine, *BENCH).succeeds().out)
        assert report["target"] == "cuda/sm90"
        assert report["machine_gbs"] > 0
    compared = ingot("verify", engine, "--against", checkpoint, "--tokens", 8, "--json").succeeds()
    assert {"cuda/sm90", "ref"} <= {each["target"] for each in json.loads(compared.out)["comparisons"]}
    assert "not compared here: cuda/sm89 needs a GPU that runs sm_89" in compared.err
    with LLM(engine, target="cuda") as llm:
        assert llm.runner.engine.manifest.target == "cuda/sm90"


def test_the_server_runs_on_the_gpu(engine: Path) -> None:
    with serving_engine(engine) as served:
        body = json.dumps({"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{served.url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert served.runner.engine.manifest.target == "cuda/sm90"


def _without_gpu(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.emulated_set_devices(0)


def _without_driver(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr("cuda.bindings.driver.cuInit", no_library)


def _without_bindings(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)


def _with_another_gpu(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_EMULATED_SM", "120")


@pytest.mark.parametrize(
    ("lack", "line"),
    [
        (_without_gpu, "  got: the NVIDIA driver shows no GPU"),
        (_without_driver, "  got: no NVIDIA driver is installed (libcuda.so.1)"),
        (_without_bindings, f"  got: cuda-python is not installed ({install('cuda')})"),
        (_with_another_gpu, "    cuda/sm89 needs a GPU that runs sm_89; this machine has Emulated GPU (sm_120)"),
    ],
)
def test_every_command_says_in_a_line_what_is_missing(
    gpu: ctypes.CDLL,
    engine: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    lack: Callable[[ctypes.CDLL, pytest.MonkeyPatch], None],
    line: str,
) -> None:
    lack(gpu, monkeypatch)
    for command in (
        ("run", "--engine_dir", engine, *PROMPT),
        ("bench", "latency", "--engine_dir", engine, *BENCH),
        ("bench", "throughput", "--engine_dir", engine, *BENCH),
        ("serve", "--engine_dir", engine, "--port", 0),
        ("verify", engine, "--against", checkpoint),
    ):
        said = ingot(*command, "--target", "cuda").fails("this machine cannot run the engine").err
        assert said.splitlines().count(line) == 1, said


@pytest.mark.slow
def test_an_engine_that_needs_a_library_is_left_to_another_target(
    gpu: ctypes.CDLL, engine: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of targets in one engine the next one runs; alone it is refused; without such matmuls it runs as before."""
    build(checkpoint, tmp_path / "floats", "cpu/avx2,cuda/sm90,ref", "--precision", "bf16").succeeds()
    build(checkpoint, tmp_path / "own", "cuda/sm90,ref", "--precision", "bf16", "--gemm_plugin", "disable").succeeds()
    assert _takes(tmp_path / "floats") == _takes(tmp_path / "own") == "cuda/sm90"
    monkeypatch.setattr(cuda_target, "find_library", lambda: "it is not here")
    assert _takes(tmp_path / "floats") == ("cpu/avx2" if detect_isa() != "none" else "ref")
    assert _takes(tmp_path / "own") == "cuda/sm90"
    reason = "cuda/sm90 computes matmuls of this engine with cuBLASLt: it is not here"
    assert reason in ingot("doctor", tmp_path / "floats").succeeds().out
    ingot("run", "--engine_dir", tmp_path / "floats", *PROMPT).succeeds()
    ingot("run", "--engine_dir", tmp_path / "floats", *PROMPT, "--target", "cuda").fails(reason)
    compared = ingot("verify", tmp_path / "floats", "--against", checkpoint, "--tokens", 8).succeeds()
    assert f"not compared here: {reason}" in compared.err


def _takes(engine: Path) -> str:
    """The target that this machine would run."""
    (state,) = json.loads(ingot("doctor", engine, "--json").succeeds().out)["engines"]
    return str(state["takes"])


def test_two_gpus_asked_for(
    gpu: ctypes.CDLL, engine: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At build, by the LLM, and by an engine of two ranks for a target that has one rank, however it was built."""
    two = build(checkpoint, tmp_path / "e", "tensorrt/sm90", "--tp_size", 2)
    two.fails("--tp_size 2 is not supported on ", code=2)
    with pytest.raises(UsageError, match=r"tensor_parallel_size is not(.|\n)*2; this machine has 1 NVIDIA GPUs"):
        LLM(engine, tensor_parallel_size=2)
    copy = tmp_path / "engine"
    build(checkpoint, copy, "cuda/sm90").succeeds()
    manifest = read_manifest(copy)
    (part,) = (each for each in manifest.parts if each.name == "rank0.engine")
    shutil.copy(copy / part.name, copy / "rank1.engine")
    second = dataclasses.replace(part, name="rank1.engine")
    parts = tuple(sorted((*manifest.parts, second), key=lambda each: each.name))
    manifest = dataclasses.replace(manifest, ranks=2, parts=parts)
    (copy / MANIFEST_NAME).write_text(manifest.to_json())
    for rank in (0, 1):
        with (copy / f"rank{rank}.engine").open("r+b") as file:
            file.seek(16)  # after magic, schema and the size of the header
            file.write(struct.pack("<II", rank, 2))
    monkeypatch.delattr(cuda_target.CudaTarget, "open_rank")
    ingot("run", "--engine_dir", copy, *PROMPT).fails(
        "  expected: 2 ranks, a GPU for each\n", "  got: 1 that run cuda/sm90; cuda/sm90 runs engines of one rank\n"
    )


def test_builds_say_that_the_compiler_is_at_work(
    gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line every few seconds, one when it is done; the compiler is slow here."""
    real = compiler.find_compiler()
    assert real is not None
    slow = tmp_path / "nvcc"
    slow.write_text(f'#!/bin/sh\nsleep 2.2\nexec "{real.path}" "$@"\n')
    slow.chmod(0o755)
    named = dataclasses.replace(real, path=slow, version="13.9")
    monkeypatch.setattr(compiler, "find_compiler", lambda: named)
    monkeypatch.setattr(CliConsole, "PERIOD", 1.5)
    lines = build(checkpoint, tmp_path / "e", "cuda/sm86").succeeds().err.splitlines()
    first = lines.index("compiling kernels for sm_86 with nvcc 13.9, 2 s")
    assert any("of machine code for cuda/sm86 in " in line for line in lines[first + 1 :])


def test_an_interrupted_compiler_is_stopped_and_nothing_is_left(
    gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that the compiler has started dies as well."""
    real = compiler.find_compiler()
    assert real is not None
    mark = tmp_path / "still alive"
    stuck = tmp_path / "nvcc"
    stuck.write_text(f'#!/bin/sh\n(sleep 2; touch "{mark}") &\nsleep 60\n')
    stuck.chmod(0o755)
    named = dataclasses.replace(real, path=stuck, version="13.8")
    monkeypatch.setattr(compiler, "find_compiler", lambda: named)
    (tmp_path / "out").mkdir()

    def interrupt(talk: CliConsole, stage: str, done: int, total: int) -> None:
        if stage.startswith("compiling") and done >= 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(CliConsole, "progress_bytes", interrupt)
    build(checkpoint, tmp_path / "out" / "e", "cuda/sm86,ref").fails("interrupted", code=130)
    assert list((tmp_path / "out").iterdir()) == []
    time.sleep(1.5)
    assert not mark.exists()


def test_bandwidth_is_that_of_the_gpu(gpu: ctypes.CDLL) -> None:
    target = find_target("cuda/sm90")
    assert isinstance(target, WithMemory)
    assert target.devices() == 1
    assert 1e7 < target.read_bandwidth(1 << 20) < 1e13
    assert not isinstance(find_target("cpu/avx2"), WithMemory)
