"""One engine for several targets: what its files hold, which target a machine takes, what is checked and refused."""

import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from ingot.engine import open_engine, read_manifest, read_plan
from ingot.errors import EngineError
from ingot.plugins.cpu.native import detect_isa, offered_isas
from tests.e2e.command import finish, ingot, start

TARGETS = "cpu/amx,ref,cpu/avx2,cpu/avx512"
BUILD = ("--max_seq_len", 64, "--precision", "f32", "--no_autotune")
PROMPT = ("--prompt", "Once upon a time", "--max_output_len", 8, "--temperature", 0)

pytestmark = pytest.mark.skipif(detect_isa() == "none", reason="this machine lacks AVX2")


@pytest.fixture(scope="module")
def engine(shipped_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "engine"
    build(shipped_checkpoint, folder, TARGETS)
    return folder


def build(checkpoint: Path, out: Path, target: str, *options: object) -> str:
    """What the build said."""
    given = ("--checkpoint_dir", checkpoint, "--output_dir", out, "--target", target, *BUILD, *options)
    return ingot("build", *given).succeeds().err


@pytest.mark.slow
def test_weights_that_lie_alike_are_stored_once(engine: Path, shipped_checkpoint: Path, tmp_path: Path) -> None:
    """Four targets of panels: one rank file, hardly larger than that of one."""
    assert read_manifest(engine).targets == tuple(TARGETS.split(","))
    assert [path.name for path in sorted(engine.glob("*.engine"))] == ["rank0.engine"]
    build(shipped_checkpoint, tmp_path / "one", "cpu/avx2")
    alone, together = (path / "rank0.engine" for path in (tmp_path / "one", engine))
    assert together.stat().st_size - alone.stat().st_size < 2 << 20
    with open_engine(tmp_path / "one") as one, open_engine(engine, target="cpu/avx2") as several:
        assert one.plan == several.plan
        assert one.manifest.target == several.manifest.target == "cpu/avx2"
        assert one.weights.tobytes() == several.weights.tobytes()


def test_every_target_has_its_own_plan(engine: Path) -> None:
    levels = {
        name: {step.kernel.rsplit(".", 1)[1] for step in read_plan(engine, target=name).steps}
        for name in TARGETS.split(",")
    }  # no kernel for float32 needs AMX
    assert levels == {"cpu/amx": {"avx512"}, "ref": {"ref"}, "cpu/avx2": {"avx2"}, "cpu/avx512": {"avx512"}}
    with pytest.raises(EngineError, match=r"has no target cuda/sm90(.|\n)*ref"):
        read_plan(engine, target="cuda/sm90")


@pytest.mark.slow
def test_the_machine_takes_what_fits_and_obeys(engine: Path, shipped_checkpoint: Path, tmp_path: Path) -> None:
    fitting = json.loads(ingot("doctor", engine, "--json").succeeds().out)["engines"][0]
    assert fitting["takes"] == next(f"cpu/{each}" for each in offered_isas() if f"cpu/{each}" in TARGETS.split(","))
    texts = {
        options: ingot("run", "--engine_dir", engine, *PROMPT, *options).succeeds().out
        for options in ((), ("--target", "ref"), ("--target", "cpu"), ("--target", "cpu/avx2"), ("--isa", "avx2"))
    }
    assert len(set(texts.values())) == 1
    build(shipped_checkpoint, tmp_path / "one", "ref")
    assert ingot("run", "--engine_dir", tmp_path / "one", *PROMPT).succeeds().out == texts["--target", "ref"]
    ingot("run", "--engine_dir", engine, *PROMPT, "--target", "cuda").fails("has no target cuda", "cpu/avx2", code=2)
    ingot("run", "--engine_dir", engine, *PROMPT, "--target", "cpu/amx", "--isa", "avx2").fails(
        "expected: cpu/amx", "capped to avx2" if detect_isa() != "avx2" else "this machine offers avx2"
    )
    ingot("run", "--engine_dir", tmp_path / "one", *PROMPT, "--target", "cpu").fails("has no target cpu", code=2)


def test_bench_names_the_target(engine: Path) -> None:
    options = ("--input_len", 8, "--output_len", 3, "--repetitions", 1, "--json", "--target", "cpu/avx2")
    for kind in ("latency", "throughput"):
        assert json.loads(ingot("bench", kind, "--engine_dir", engine, *options).succeeds().out)["target"] == "cpu/avx2"


def test_inspect_lists_every_target(engine: Path) -> None:
    document = json.loads(ingot("inspect", engine, "--json").succeeds().out)
    assert [target["target"] for target in document["targets"]] == TARGETS.split(",")
    assert {target["file"] for target in document["targets"]} == {"rank0.engine"}
    assert all(len(target["steps"]) > 10 for target in document["targets"])
    text = ingot("inspect", engine).succeeds().out
    for name in TARGETS.split(","):
        assert f"target      {name} in f32: plan and weights in rank0.engine" in text
    assert "matmul.f32.avx512" in text
    assert "matmul.f32.ref" in text


@pytest.mark.slow
def test_verify_covers_every_target(engine: Path, shipped_checkpoint: Path, tmp_path: Path) -> None:
    """Hashes of all, numbers of those that run here; results go to the target that they are of."""
    copy = Path(shutil.copytree(engine, tmp_path / "engine"))
    compared = ("verify", copy, "--against", shipped_checkpoint, "--tokens", 8)
    result = ingot(*compared, "--json").succeeds()
    here = [each["target"] for each in json.loads(result.out)["comparisons"]]
    assert {"cpu/avx2", "ref"} <= set(here)
    for name in set(TARGETS.split(",")) - set(here):
        assert f"not compared here: {name} needs" in result.err
    one = ingot(*compared, "--target", "ref", "--store_results", "--json").succeeds()
    assert json.loads(one.out)["target"] == "ref"
    manifest = read_manifest(copy)
    assert manifest.of("ref").verification
    assert not manifest.of("cpu/avx2").verification
    ingot("verify", copy).succeeds()
    ingot("verify", copy, "--target", "ref").fails("need --against", code=2)


def test_a_target_that_is_named_twice_is_built_once(shipped_checkpoint: Path, tmp_path: Path) -> None:
    said = build(shipped_checkpoint, tmp_path / "e", " ref, cpu/avx2,ref")
    assert said.count("KV cache in f32, in rank0.engine") == 2
    assert read_manifest(tmp_path / "e").targets == ("ref", "cpu/avx2")


def test_a_list_without_a_name_or_with_an_unknown_one_is_refused(shipped_checkpoint: Path, tmp_path: Path) -> None:
    for target, words in (("ref,", "empty name"), ("ref,gpu", "there is no target 'gpu'")):
        given = ("build", "--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", "--target", target)
        ingot(*given).fails(words, code=2)
        assert not (tmp_path / "e").exists()


def test_a_dump_has_a_folder_for_each_target(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build(tiny_checkpoint, tmp_path / "e", "ref,cpu/avx2", "--dry_run", "--dump_passes", tmp_path / "dump")
    names = {path.relative_to(tmp_path / "dump").as_posix() for path in (tmp_path / "dump").rglob("*set_precision*")}
    assert {name.split("/")[0] for name in names} == {"ref", "cpu-avx2"}
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_of_any_target(shipped_checkpoint: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    given = ("--checkpoint_dir", shipped_checkpoint, "--output_dir", tmp_path / "e", "--target", "ref,cpu/avx2")
    finish(start("build", *given, before=small_files)).fails("disk is full", "next:")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_build_keeps_the_earlier_engine(large_checkpoint: Path, tmp_path: Path) -> None:
    """Bytes of the engine that was there are untouched, and nothing else is left."""
    given = ("--checkpoint_dir", large_checkpoint, "--output_dir", tmp_path / "e", "--no_autotune")
    ingot("build", *given, "--target", "ref").succeeds()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "e").iterdir()}
    process = start("build", *given, "--target", "ref,cpu/avx2")
    while process.poll() is None and not list(tmp_path.glob(".e.partial-*/*")):
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGINT)
    finish(process).fails("interrupted", code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "e").iterdir()} == before
    open_engine(tmp_path / "e").close()
