"""The cuda targets as users meet them: what is missing in words, engines built without a GPU, the command line."""

import ctypes
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from ingot.engine import open_engine, read_plan
from ingot.errors import TargetError, UsageError
from ingot.plugins.cuda import compiler
from ingot.plugins.cuda.bind import OPS
from ingot.plugins.cuda.gpu import find_gpus
from ingot.plugins.cuda.plan_facts import code_weight
from ingot.plugins.registry import find_target, targets
from ingot.plugins.target import SessionOptions
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.ops.states import CUDA_OPS, FP8_OPS, GPU_OPS

NAMES = ["cuda/sm120", "cuda/sm100", "cuda/sm90", "cuda/sm89", "cuda/sm86", "cuda/sm80"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    model = write_model(folder / "model", {**TINY_LLAMA, "head_dim": 16})
    ingot("convert", "--model_dir", model, "--output_dir", folder / "checkpoint").succeeds()
    return folder / "checkpoint"


def _build(checkpoint: Path, out: Path, target: str = "cuda/sm90") -> Path:
    limits = ("--max_seq_len", 64, "--tokens_per_block", 16, "--precision", "f32")
    ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", out, "--target", target, *limits).succeeds()
    return out


def test_every_target_has_kernels_of_the_same_ops() -> None:
    assert [target.name for target in targets() if target.name.startswith("cuda/")] == NAMES
    assert set(OPS) == GPU_OPS | CUDA_OPS
    for name in NAMES:
        kernels = find_target(name).kernels()
        lacking = FP8_OPS if name in ("cuda/sm80", "cuda/sm86") else set()
        assert {kernel.split(".")[0] for kernel in kernels} == {*GPU_OPS, *CUDA_OPS, "sample"} - lacking
        for kernel in ("matmul.bf16.sm80", "matmul.f16.sm80", "matmul.f32.sm80"):
            assert {kernel, f"{kernel}.cublaslt"} <= set(kernels)


@pytest.mark.slow
def test_who_multiplies_and_where_contexts_are_cut_stands_in_the_plan(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    """The build says it, `inspect` and `--dump_passes` show it."""
    model = write_model(tmp_path / "m", {**TINY_LLAMA, "head_dim": 16, "max_position_embeddings": 1024})
    ingot("convert", "--model_dir", model, "--output_dir", tmp_path / "c").succeeds()
    args = ("build", "--checkpoint_dir", tmp_path / "c", "--target", "cuda/sm90", "--precision", "bf16")
    needs = "cuBLASLt computes matmuls of many rows; machines without it refuse the engine"
    dump = ("--dump_passes", tmp_path / "passes", "--log_level", "debug")
    built = ingot(*args, "--output_dir", tmp_path / "e", *dump).succeeds()
    assert needs in built.err
    assert "pass use_library: 9" in built.err
    assert "pass cast_inputs: 1" in built.err, "the last layer's rows are gathered in float32"
    assert "pass split_contexts: 2" in built.err
    assert "pass choose_tiles: 9" in built.err
    files = {path.name.partition("_")[2]: path for path in (tmp_path / "passes").iterdir()}
    assert '"splits":[]' in files["use_library.json"].read_text()
    assert "matmul.bf16.sm90a.cublaslt" in files["use_library.json"].read_text()
    assert "cublaslt" not in files["use_many_rows.json"].read_text()
    assert '"most_items":64' in files["split_contexts.json"].read_text()
    assert '"op":"cast"' in files["cast_inputs.json"].read_text()
    assert '"kernel":"cuBLASLt"' in files["choose_tiles.json"].read_text()
    shown = ingot("inspect", tmp_path / "e", "--all").succeeds().out
    assert "matmul.bf16.sm80.cublaslt" in shown
    assert "matmul.bf16.sm90a.cublaslt" in shown
    assert "attention   parts of a context by sequences: 8 up to 33, 7 up to 37, 6 up to 44, 5 up to 52" in shown
    assert "draws       tokens by sample.f32.sm80\n" in shown
    assert "graphs      of decode steps with 1, 2, 4, 8, 16, 32, 64 sequences; smaller batches are filled up" in shown
    few = "product_8_half up to 8 rows, product_16_half up to 16 rows"
    assert f"tiles       layers.0-1/qkv, layers.0/attention_out, layers.0/down: {few}, cuBLASLt for more\n" in shown
    inspected = json.loads(ingot("inspect", tmp_path / "e", "--json").succeeds().out)
    assert inspected["splits"][0] == {"most_items": 33, "parts": 8, "least_tokens": 128}
    assert inspected["tilings"][0]["tiles"][0] == {"most_rows": 8, "kernel": "product_8_half", "rows": 8, "parts": 1}
    built = ingot(*args, "--output_dir", tmp_path / "own", "--gemm_plugin", "disable").succeeds()
    assert needs not in built.err
    assert "gemm_plugin" not in built.err
    shown = ingot("inspect", tmp_path / "own", "--all").succeeds().out
    assert "matmul.bf16.sm80" in shown
    assert not {"cublaslt", "sm90a"} & {*shown.replace(".", " ").split()}


def test_the_engine_holds_the_machine_code(gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path) -> None:
    """Uncompressed, on a page of its own, in the rank file; `inspect` says where."""
    engine = _build(checkpoint, tmp_path / "engine")
    opened = open_engine(engine)
    code = code_weight(opened.plan)
    (piece,) = code.pieces
    assert code.layout == "cubin12.sm_90a"
    bits = opened.weights[piece.offset : piece.offset + code.nbytes]
    assert bytes(bits[:4]) == b"\x7fELF"
    whole = (engine / "rank0.engine").read_bytes()
    inspected = json.loads(ingot("inspect", engine, "--json").succeeds().out)
    (listed,) = inspected["code"]
    assert whole[listed["offset"] : listed["offset"] + listed["bytes"]] == bits.tobytes()
    assert listed["offset"] % 4096 == 0
    assert listed["architecture"] == "sm_90a"
    assert "sm_90a" in ingot("inspect", engine, "--all").succeeds().out
    ingot("verify", engine).succeeds()


def test_products_lie_row_by_row(gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path) -> None:
    plan = read_plan(_build(checkpoint, tmp_path / "engine"))
    assert {weight.layout for weight in plan.weights} == {"row", "cubin12.sm_90a"}
    gate_up = next(step for step in plan.steps if step.attrs.get("gated"))
    shape = next(weight.shape for weight in plan.weights if weight.name == gate_up.inputs[1])
    assert shape == (2 * TINY_LLAMA["intermediate_size"], TINY_LLAMA["hidden_size"])  # type: ignore[operator]


def test_builds_are_reproducible(gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path) -> None:
    one, other = (_build(checkpoint, tmp_path / name) / "rank0.engine" for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_run_and_doctor_with_a_gpu(gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path) -> None:
    engine = _build(checkpoint, tmp_path / "engine")
    machine = json.loads(ingot("doctor", "--json").succeeds().out)
    state = {target["name"]: target for target in machine["targets"]}
    assert state["cuda/sm90"]["runs"]
    assert not state["cuda/sm89"]["runs"]
    why_not = state["cuda/sm89"]["why_not"]
    assert "cuda/sm89 needs a GPU that runs sm_89; this machine has Emulated GPU (sm_90)" in why_not
    assert machine["gpus"] == ["Emulated GPU (sm_90, 4 GiB)"]
    assert machine["cuda"]["compiler"].startswith("nvcc 13.0.0, on the path")
    ingot("run", "--engine_dir", engine, "--prompt", "x", "--isa", "avx2").fails("an ISA caps a CPU", code=2)
    options = SessionOptions(num_blocks=(4,), threads=2)
    with pytest.raises(UsageError, match="threads"):
        find_target("cuda/sm90").open_session(read_plan(engine), np.empty(0, np.uint8), options)


def test_without_a_gpu_a_line_says_so(gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path) -> None:
    engine = _build(checkpoint, tmp_path / "engine")
    gpu.emulated_set_devices(0)
    assert find_gpus().why_not == "the NVIDIA driver shows no GPU"
    ingot("run", "--engine_dir", engine, "--prompt", "x").fails(
        "this machine cannot run the engine", "cuda/sm90", "the NVIDIA driver shows no GPU"
    )
    with pytest.raises(TargetError, match="no GPU"):
        find_target("cuda")


def test_another_gpu_is_refused(
    gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code for sm_80 runs on 8.9, code for sm_90a on 9.0 alone."""
    for capability, runs in (
        ("89", {"sm80", "sm86", "sm89"}),
        ("86", {"sm80", "sm86"}),
        ("90", {"sm90"}),
        ("103", {"sm100"}),
        ("121", {"sm120"}),
        ("75", set()),
    ):
        monkeypatch.setenv("INGOT_EMULATED_SM", capability)
        assert {name.removeprefix("cuda/") for name in NAMES if find_target(name).run_blocker() is None} == runs


def test_without_nvcc_build_and_doctor_say_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler, "_TOOLKITS", ())
    monkeypatch.setattr(compiler, "_IN_WHEELS", ())
    command = ("build", "--checkpoint_dir", checkpoint, "--target", "cuda/sm90", "--output_dir", tmp_path / "e")
    ingot(*command).fails("cannot build for cuda/sm90", "no CUDA compiler (nvcc)", "pip install nvidia-cuda-nvcc")
    assert not (tmp_path / "e").exists()
    ingot(*command, "--dry_run").succeeds()
    state = {each["name"]: each for each in json.loads(ingot("doctor", "--json").succeeds().out)["targets"]}
    assert not state["cuda/sm90"]["builds"]
    assert "pip install nvidia-cuda-nvcc" in state["cuda/sm90"]["why_not"]


def test_an_old_nvcc_is_named(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiler.find_compiler()
    assert real is not None
    old = compiler.Compiler(path=real.path, origin="on the path", version="11.2", architectures=("sm_80",))
    monkeypatch.setattr(compiler, "find_compiler", lambda: old)
    assert find_target("cuda/sm80").build_blocker() is None
    assert "nvcc 11.2 (on the path) does not know sm_120" in (find_target("cuda/sm120").build_blocker() or "")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a"])
def test_a_real_compiler_gives_a_cubin(architecture: str, checkpoint: Path, tmp_path: Path) -> None:
    """The one place where nvcc itself builds an engine: an ELF file for NVIDIA GPUs, with every kernel by name."""
    if compiler.find_compiler() is None:
        pytest.skip("this machine lacks nvcc (pip install nvidia-cuda-nvcc)")
    opened = open_engine(_build(checkpoint, tmp_path / "engine"))
    code = code_weight(opened.plan)
    (piece,) = code.pieces
    bits = opened.weights[piece.offset : piece.offset + code.nbytes].tobytes()
    assert struct.unpack_from("<H", bits, 18) == (190,)  # EM_CUDA
    for kernel in ("embed", "residual_norm", "attention_rows", "rotate_and_store", "epilogue", "draw_tokens"):
        assert f".text.{kernel}\0".encode() in bits
