"""The GPU proof without a GPU: what is missing in a line; on the emulated GPU: each part, small."""

import ctypes
import dataclasses
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.bench.latency import BatchLatency, LatencyReport
from ingot.errors import TargetError
from ingot.plugins.cuda.gpu import Found, Gpu, find_gpus
from ingot.plugins.tensorrt.library import Library
from tests import quantised as write
from tests.convert.quantised.test_formats import AWQ
from tests.gpu_proof import __main__ as main_module
from tests.gpu_proof import kernels, kinds, rtx, speed, tokens, transformers_speed
from tests.gpu_proof.__main__ import PARTS, Part, main
from tests.gpu_proof.result import Check, Result, ResultFile
from tests.gpu_proof.shapes import SHAPES
from tests.gpu_proof.work import Job, checkpoint_of
from tests.handmade import TINY_GPT2, TINY_LLAMA, write_model
from tests.house.project import ROOT
from tests.plugins.tensorrt.emulated_runtime import EmulatedTensorRt

TINY = {**TINY_LLAMA, "head_dim": 16, "num_key_value_heads": 2}
GPU = Gpu(index=0, name="A GPU", capability=(9, 0), memory_bytes=1, multiprocessors=4)


@pytest.fixture
def driver(gpu: ctypes.CDLL) -> ctypes.CDLL:
    """The emulated one."""
    return gpu


def run(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def document_of(folder: Path, part: str) -> dict[str, Any]:
    (path,) = folder.glob(f"gpu-{part}-emulated-gpu-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_without_a_gpu_each_part_says_what_is_missing(tmp_path: Path) -> None:
    """As a command: one line per part, no file."""
    command = [sys.executable, "-m", "tests.gpu_proof", "--work", str(tmp_path / "w")]
    done = subprocess.run(
        [*command, "--results", str(tmp_path / "r")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line.split(" ")[0] for line in lines] == list(PARTS)
    (reason,) = {line.split("not done: ")[1] for line in lines}
    assert "NVIDIA driver" in reason or "cuda-python" in reason
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parts", [("--parts", "b,c,d"), ("--parts=b,c,d",)])
def test_several_parts_have_a_process_each(
    parts: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails leaves the others, and is remembered."""
    started: list[list[str]] = []

    def process(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        started.append(command)
        return subprocess.CompletedProcess(command, int(command[-1] == "c"))

    monkeypatch.setattr(main_module, "find_gpus", lambda: Found(gpus=(GPU,), why_not=None))
    monkeypatch.setattr("tests.gpu_proof.__main__.subprocess.run", process)
    assert run("--work", tmp_path, *parts, "--context", 64) == 1
    assert [command[3:] for command in started] == [
        ["--work", str(tmp_path), "--context", "64", "--parts", part] for part in "bcd"
    ]
    assert [command[1:3] for command in started] == [["-m", "tests.gpu_proof"]] * 3


def test_what_was_found_before_an_error_is_kept(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong in a check leaves those behind it; every result is on disk before the next check begins."""
    on_disk: list[int] = []

    def full() -> Iterator[Result]:
        yield Result(name="one", command="c", ok=True)
        raise TargetError("the GPU is full")

    def breaks() -> Iterator[Result]:
        on_disk.append(len(document_of(tmp_path / "r", "b")["results"]))
        raise ZeroDivisionError

    def checks(job: Job) -> Iterator[Check]:
        yield from (Check("full", full), Check("breaks", breaks))
        yield Check("last", lambda: [Result(name="last", command="c", ok=True, figures={"before": len(job.found)})])

    monkeypatch.setitem(PARTS, "b", Part(what="kernels", checks=checks))
    given = ("--work", tmp_path / "w", "--results", tmp_path / "r", "--parts", "b")
    assert run(*given) == 1
    results = document_of(tmp_path / "r", "b")["results"]
    assert {each["name"]: each["ok"] for each in results} == {"one": True, "full": False, "breaks": False, "last": True}
    assert [each["name"] for each in results] == ["one", "full", "breaks", "last"]
    assert on_disk == [2]
    assert results[1]["missing"].startswith("the GPU is full\n")
    assert "ZeroDivisionError" in results[2]["figures"]["raised"]


def test_what_ended_is_kept(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on where one with the same arguments was cut off; what was missing is asked for again."""
    done: list[str] = []

    def check(name: str, result: Result | None) -> Check:
        def work() -> Iterator[Result]:
            done.append(name)
            if result is None:
                raise KeyboardInterrupt
            yield result

        return Check(name, work)

    good, missing = Result(name="good", command="c", ok=True), Result(name="gone", command="c", missing="no tool")
    first = [check("good", good), check("gone", missing), check("cut", None)]
    given = ("--work", tmp_path / "w", "--results", tmp_path / "r", "--parts", "b")
    monkeypatch.setitem(PARTS, "b", Part(what="kernels", checks=lambda job: first))
    with pytest.raises(KeyboardInterrupt):
        run(*given)
    assert len(document_of(tmp_path / "r", "b")["results"]) == 2
    first[2] = check("cut", good)
    assert run(*given) == 1
    assert done == ["good", "gone", "cut", "gone", "cut"]
    assert "b good: yes (kept)" in capsys.readouterr().out
    run(*given, "--context", "7")
    run(*given, "--context", "7", "--again")
    assert done[5:] == ["good", "gone", "cut"] * 2, "other arguments, or --again"
    (tmp_path / "w" / "kept-b.json").write_text("{damaged")
    run(*given)
    assert done[11:] == ["good", "gone", "cut"]


@pytest.mark.parametrize("wrong", [("--parts", "a,x"), ("--shapes", "gpt-5"), ("--batches", "1,0"), ("--prompts", "x")])
def test_wrong_usage(wrong: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--work", "nowhere", *wrong)
    assert caught.value.code == 2
    assert "python -m tests.gpu_proof: error: " in capsys.readouterr().err


@pytest.mark.slow
def test_models_answer_as_on_the_cpu(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random model does not sort, and that is found too."""
    llama, gpt = write_model(tmp_path / "tiny", TINY), write_model(tmp_path / "sorts", TINY_GPT2)
    monkeypatch.setattr(tokens, "SHIPPED", llama)
    monkeypatch.setattr(tokens, "PRECISIONS", ("f32", "bf16"))
    monkeypatch.setattr(tokens, "PROMPTS", 4)
    monkeypatch.setattr(tokens, "NEW", 5)
    monkeypatch.setattr(tokens, "LETTERS", 2)
    given = ("--work", tmp_path / "w", "--results", tmp_path / "r", "--parts", "c", "--sort_model", gpt)
    assert run(*given) == 1
    out = capsys.readouterr().out
    assert "c tokens of tiny in f32: yes: prompts 4, new 5, equal 4" in out
    for precision in ("f32", "bf16"):
        assert f"c layers of tiny in {precision}: yes" in out
    assert "c 729 sorts: NO: inputs 9" in out
    document = document_of(tmp_path / "r", "c")
    assert str(document["command"]).startswith("python -m tests.gpu_proof --work")
    assert (document["sm"], document["cuda_driver"]) == ("90", "13.0")
    assert len(document["results"]) == 4
    assert "--target cuda/sm90 --precision f32" in json.dumps(document["results"])


@pytest.mark.slow
def test_a_gpu_that_computes_something_else_is_found(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "PROMPTS", 3)
    real = tokens._generate
    monkeypatch.setattr(tokens, "_generate", lambda engine, *given: real(engine, *given) + ("cuda" in engine.name))
    job = Job(work=tmp_path, gpu=find_gpus().gpus[0])
    result = tokens.same_tokens(job, checkpoint_of(tmp_path, write_model(tmp_path / "tiny", TINY)))
    assert result.ok is False
    assert result.figures["equal"] == 0


@pytest.mark.slow
def test_speed_of_a_shape(
    driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decode, attention, prefill; transformers sees no GPU here, so products are not measured."""
    monkeypatch.setattr(main_module, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(speed, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(speed, "SHORT", 2)
    numbers = ("--batches", "1,2", "--context", "12", "--output", "3", "--prompts", "20", "--repetitions", "1")
    given = ("--work", tmp_path / "w", "--results", tmp_path / "r", "--parts", "d", "--shapes", "tiny", *numbers)
    assert run(*given) == 1, "without transformers it is not done"
    results = {each["name"]: each for each in document_of(tmp_path / "r", "d")["results"]}
    measured = {"tiny: decode of 1", "tiny: decode of 2", "tiny: attention of 2", "tiny: prefill of 20"}
    beside = {f"tiny: {each} beside transformers" for each in ("decode of 1", "decode of 2", "prefill of 20")}
    products = {"large products in bf16"}
    assert measured | beside | products <= set(results)
    alone = [each["figures"] for name, each in results.items() if name.startswith("tiny: kernels of 2: ")]
    assert {each["kernel"].split(".")[0] for each in alone} >= {"matmul", "rms_norm", "paged_attention"}
    assert all(each["seconds"] > 0 and each["nbytes"] > 0 for each in alone)
    assert results["tiny: decode of 2"]["figures"]["of_bandwidth"] > 0
    assert results["tiny: decode of 1"]["ok"] in (True, False)
    assert results["tiny: prefill of 20"]["figures"]["tflops"] > 0
    assert results["tiny: prefill of 20"]["ok"] is None
    assert "ingot bench latency --engine_dir" in results["tiny: decode of 1"]["command"]
    assert not (tmp_path / "w" / "tiny-checkpoint").exists(), "the engine is enough"
    said = results["tiny: decode of 1 beside transformers"]["missing"]
    assert "sees no GPU" in said or "transformers is not" in said
    assert "not done" in capsys.readouterr().out


@pytest.mark.slow
def test_kernels_of_a_kind(driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats from a seed and stored codes: each kernel is timed; what cannot be made is named."""
    small = {
        **TINY_LLAMA,
        "num_hidden_layers": 1,
        "head_dim": 16,
        "attention_bias": False,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    monkeypatch.setattr(kinds, "SHAPES", {"llama-3.1-8b": small})
    monkeypatch.setattr(kinds, "TOKENS", 64)
    made = {
        "floats": kinds.Kind(make=partial(kinds._seeded, kinds._wide(1)), options={"precision": "bf16"}),
        "codes": kinds.Kind(make=kinds._quantised({**AWQ, "group_size": 32}, write.awq(32))),
        "wrong": kinds.Kind(make=partial(kinds._seeded, {}), options={"precision": "bf16"}),
    }
    monkeypatch.setattr(kinds, "KINDS", made)
    monkeypatch.setattr(kinds, "BATCHES", (1,))
    monkeypatch.setattr(kinds, "PROMPTS", (40,))
    monkeypatch.setattr(kinds, "CONTEXT", 20)
    assert run("--work", tmp_path / "w", "--results", tmp_path / "r", "--parts", "e") == 1
    results = document_of(tmp_path / "r", "e")["results"]
    assert [each["name"] for each in results if each["ok"] is False] == ["wrong"]
    seen = {each["name"]: each["figures"]["kernel"] for each in results if each["ok"] is not False}
    assert seen["floats: kernels of 1: qkv"] == "matmul.bf16.sm80.cublaslt"
    assert seen["codes: kernels of a prompt of 40: down"] == "matmul.w4ts.sm90a"


def test_decode_is_judged_by_steps_of_all_sequences(tmp_path: Path) -> None:
    """Prompts of others beside the first tokens of most requests; fewer sequences beside the last tokens."""
    job = Job(work=tmp_path, gpu=GPU, batches=(1, 256), prompts=(2048, 8192), context=1024, output=64)
    steps, output = speed._prompt_steps(job, 256, 1024), speed._output(job, 1024)
    assert 256 * 1024 / 8192 < steps < 40
    assert output == 64 + 2 * steps
    gaps = (15.0,) * steps + (6.0,) * 63 + (1.0,) * steps
    assert len(gaps) == output - 1
    each = BatchLatency(
        batch_size=256,
        ttft_ms=300,
        tpot_ms=9,
        itl_ms=gaps,
        tokens_per_second=1,
        bandwidth_gbs=1000,
        bandwidth_fraction=0.25,
    )
    assert speed._step_ms(job, each, 1024) == 6
    report = LatencyReport(
        engine="e",
        target="t",
        input_len=1024,
        output_len=output,
        repetitions=1,
        machine_gbs=4000,
        buffer_bytes=1,
        batches=(each,),
    )
    figures = speed._decode("x", "", report, each, 6.0).figures
    assert figures["tokens_per_second"] == pytest.approx(256e3 / 6)
    assert figures["of_bandwidth"] == pytest.approx(0.375)


def test_ratios_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(work=tmp_path, gpu=GPU)
    for regime, ours in (("decode 1", 131.0), ("prefill 20", 60.0), ("decode 8", None)):
        job.found.append(Result(name=f"x: {regime}", command="c", figures={"tokens_per_second": ours}))
    theirs = {"decode 1": 100.0, "prefill 20": 50.0, "decode 8": 5.0}
    for regime, ok, ratio in (("decode 1", True, 1.31), ("prefill 20", False, 1.2), ("decode 8", None, None)):
        monkeypatch.setattr(speed, "_torch", lambda given, r=regime: {"command": "c", "tokens_per_second": theirs[r]})
        result = speed._ratio(job, "x", regime, [])
        assert (result.ok, result.figures["ratio"]) == (ok, ratio)


def test_transformers_begin_every_round_behind_the_same_prompt(tmp_path: Path) -> None:
    """On the CPU: a static cache counts its tokens itself, and would be full after the first rounds."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with torch.inference_mode():
        timed = transformers_speed.Timed(torch, transformers, tmp_path / "config.json", "cpu", compiled=False)
        assert timed.decode(2, 12, 3) > 0
        assert timed.prefill(20) > 0
    assert transformers_speed.products(torch, "cpu", 64) > 0
    assert "sees no GPU" in str(transformers_speed.measure(["products"])) or torch.cuda.is_available()


@pytest.mark.parametrize(("valid", "ok"), [(False, True), (True, False)])
def test_what_tensorrt_rtx_says_of_the_gpu(
    valid: bool, ok: bool, driver: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 9.0 it must refuse; where it does not, the table of GPUs is to be changed."""
    library = Library(name="TensorRT-RTX", version="1.7.1.116", module="emulated_tensorrt", folder=Path("nowhere"))
    header = struct.pack("<4s12xQ4B4sI28x", b"vtrt", 64, 1, 7, 1, 116, b"vtrt", 0x7E)
    (tmp_path / "rank0.plan").write_bytes(header)
    module = EmulatedTensorRt(driver, None)  # type: ignore[arg-type]
    module.valid = valid
    monkeypatch.setitem(sys.modules, library.module, module)
    monkeypatch.setattr(rtx, "find_rtx", lambda: library)
    monkeypatch.setattr("ingot.plugins.tensorrt.target.find_rtx", lambda: library)
    monkeypatch.setattr(rtx, "checkpoint_of", lambda work, model: work)
    monkeypatch.setattr(rtx, "engine_of", lambda checkpoint, config: (tmp_path, "ingot build"))
    (check,) = rtx.checks(Job(work=tmp_path, gpu=GPU))
    (result,) = check.run()
    assert result.ok is ok
    assert result.figures["ingot_runs_it"] is False
    assert result.figures["capabilities"].startswith("8.0, 8.6")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx, "find_rtx", lambda: "TensorRT-RTX is not installed")
    (result,) = rtx.rtx_validity(Job(work=tmp_path, gpu=GPU))
    assert result.line() == "TensorRT-RTX on this GPU: not done: TensorRT-RTX is not installed"


@pytest.mark.slow
def test_the_kernels_tests_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests stand for those that need a GPU."""
    monkeypatch.setattr(kernels, "FILES", ["tests/hall/test_resource_estimate.py"])
    monkeypatch.setattr("tests.gpu_proof.kernels.shutil.which", lambda name: None)
    checks = list(kernels.kernels(Job(work=tmp_path, gpu=GPU)))
    assert [each.name for each in checks] == [*kernels.FILES, *kernels.TOOLS]
    (tests,), *tools = [list(each.run()) for each in checks]
    assert tests.ok
    assert tests.figures["tests"] > 1
    assert tests.figures["failures"] == tests.figures["errors"] == 0
    assert "-W default" in tests.command
    assert all(tool.missing == "compute-sanitizer is not on the path" for (tool,) in tools)
    failed = kernels.run("a tool", [sys.executable, "-c", "raise SystemExit('a race')"], tmp_path)
    assert failed.ok is False
    assert "a race" in failed.figures["said"]
    monkeypatch.setattr(kernels, "SECONDS", 0.2)
    late = kernels.run("a tool", [sys.executable, "-c", "import time; time.sleep(9)"], tmp_path)
    assert late.ok is False
    other = dataclasses.replace(GPU, capability=(8, 9))
    (result,) = next(kernels.kernels(Job(work=tmp_path, gpu=other))).run()
    assert result.missing == "the tests need a GPU of sm_90; this machine has A GPU (sm_89)"


def test_every_file_of_tests_is_there() -> None:
    assert all((ROOT / name).is_file() for name in kernels.FILES)


def test_shapes_are_those_of_the_models() -> None:
    sizes = {
        name: (shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]) for name, shape in SHAPES.items()
    }
    assert sizes == {
        "llama-3.2-1b": (2048, 16, 128256),
        "llama-3.1-8b": (4096, 32, 128256),
        "qwen3-8b": (4096, 36, 151936),
    }


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    result = Result(name="x", command="c", ok=True, figures={"a": float("nan"), "b": [float("inf"), 1.0]})
    file = ResultFile(tmp_path, "d", "speed", "python -m tests.gpu_proof", Found(gpus=(GPU,), why_not=None))
    file.add(result)
    document = json.loads(file.path.read_text())
    assert document["results"][0]["figures"] == {"a": None, "b": [None, 1.0]}
