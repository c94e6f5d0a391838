"""Engines for cuda targets that keep the codes of a quantised checkpoint, on the emulated GPU: every layer, and steps
of several sequences, against `ref` on the same plan."""

import contextlib
import ctypes
from pathlib import Path

import pytest

from ingot.builder.build import BuildReport, build
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import open_engine, read_manifest, read_plan
from ingot.plan import Plan
from ingot.plugins.cuda.devices import devices_of
from ingot.plugins.cuda.estimate import step_ops
from ingot.plugins.cuda.plan_facts import specialisation
from ingot.plugins.registry import find_op, find_target
from ingot.plugins.target import SessionOptions
from ingot.step_work import Load
from tests import quantised as write
from tests.convert.gguf.test_blocks import write_llama
from tests.convert.quantised import test_mxfp4 as mxfp4
from tests.convert.quantised.test_formats import CASES
from tests.plugins.cuda.decode_steps import BLOCKS, SEQUENCES, compare_decode

KINDS = {  # source → formats of its matmuls
    "awq g32": {"w4tsg32", "w8"},
    "ct nvfp4": {"w4tg16", "w8"},
    "hqq 4 bits": {"w4tsg128", "w4tsg32", "w8"},
    "bnb nf4": {"w4tg128", "w4tg32", "w8"},
    "fp8 rows": {"f8", "w8"},
    "fp8 blocks of 32 columns": {"f8g32", "w8"},
    "gptq, bits by module": {"w8tg32", "w8tsg32", "w8"},
    "gptq v1 asymmetric, desc_act": {"w4tsg32", "w8"},
    "gptq 3 bits": {"w3tg32", "w8"},
    "auto-round 2 bits, symmetric": {"w2tg32", "w8"},
}
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = range(10, 15)


def built(folder: Path, *, dtype: DType | None = None, target: str = "cuda/sm90", name: str = "model") -> BuildReport:
    convert(ConvertOptions(model_dir=folder / name, output_dir=folder / "checkpoint", dtype=dtype))
    config = BuildConfig(target=target, tokens_per_block=16, max_num_tokens=48, max_batch_size=SEQUENCES)
    return build(config, folder / "checkpoint", folder / "engine")


def formats(plan: Plan) -> set[str]:
    """Of the weights of all matmuls that are quantised."""
    weights = {each.name: each for each in plan.weights}
    found = set()
    for step in plan.steps:
        packed = find_op(step.op).packed
        if packed is not None and (dtype := weights[step.inputs[packed]].dtype).is_quantised:
            found.add(dtype.value + (f"g{step.attrs['group']}" if step.attrs["group"] else ""))
    return found


def check(folder: Path, expected: set[str]) -> None:
    """Every layer of a prompt, then prompts and steps of several sequences."""
    compare(folder / "engine", folder / "checkpoint", CompareOptions(tokens=40)).raise_if_wrong()
    found = check_steps(folder)
    assert found <= expected
    assert found - {"w8"}, "codes are kept"


def check_steps(folder: Path) -> set[str]:
    """Prompts and steps of several sequences; gives the formats."""
    engine = open_engine(folder / "engine")
    options = SessionOptions(num_blocks=engine.plan.in_each(BLOCKS))
    with contextlib.closing(find_target("cuda/sm90").open_session(engine.plan, engine.weights, options)) as session:
        compare_decode(session, engine, (5, 1), 2e-2)
    return formats(engine.plan)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_source(gpu: ctypes.CDLL, tmp_path: Path, kind: str) -> None:
    settings, packer, _ = CASES[kind]
    write.write_model(tmp_path / "model", settings, packer)
    report = built(tmp_path)
    assert not [note for note in report.notes if "computes no" in note]
    check(tmp_path, KINDS[kind])


@pytest.mark.slow
def test_a_mixture_of_k_quants(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    """v has six bits: its matmul is another one than that of q and k, and the columns of both are joined."""
    write_llama(tmp_path, Q4_K, kinds={"attn_v": Q6_K, "ffn_down": Q6_K})
    report = built(tmp_path, name="model.gguf")
    assert {"join_columns"} <= {step.op for step in report.plan.steps}
    check(tmp_path, {"w4ksg32", "w6kg16", "w8"})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "format"), [(Q2_K, "w2ksg16"), (Q3_K, "w3kg16"), (Q5_K, "w5ksg32")])
def test_other_k_quants(gpu: ctypes.CDLL, tmp_path: Path, kind: int, format: str) -> None:
    write_llama(tmp_path, kind)
    built(tmp_path, name="model.gguf")
    check(tmp_path, {format, "w8"})


@pytest.mark.slow
def test_experts_in_mxfp4(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    mxfp4.write_model(tmp_path)
    report = built(tmp_path, dtype=DType.BF16, name="stacks")
    experts = {step.kernel for step in report.plan.steps if find_op(step.op).experts}
    assert experts == {"moe_gate_up.w4t.sm90a", "moe_down.w4t.sm90a"}
    check(tmp_path, {"w4tg32", "w8"})


@pytest.mark.slow
@pytest.mark.long  # kernels are compiled for each one's head size and formats
@pytest.mark.shared
def test_checkpoints_that_other_programs_wrote(gpu: ctypes.CDLL, shared: Path, tmp_path: Path) -> None:
    """One of each source."""
    for name in (
        *("awq-gemm-g128", "gptq-v1-asym-g32-desc_act", "ct-w4a16-sym-g32-actorder", "ct-nvfp4", "ct-mxfp4"),
        *("hqq-4bit-g64", "bnb-nf4", "modelopt-fp8", "fp8-block", "autoround-gptq-mixed", "gguf-k-quants-mix"),
    ):
        folder, stored = tmp_path / name, shared / "models" / "quantised" / name
        folder.mkdir()
        model = "model.gguf" if (stored / "model.gguf").is_file() else "model"
        (folder / model).symlink_to(stored / "model.gguf" if model == "model.gguf" else stored)
        built(folder, name=model)
        assert check_steps(folder) != {"w8"}, name


@pytest.mark.slow
def test_targets_share_the_codes(gpu: ctypes.CDLL, tmp_path: Path) -> None:
    """One file of weights serves CPUs and GPUs, and the engine is not larger for its second target."""
    settings, packer, _ = CASES["awq g32"]
    write.write_model(tmp_path / "model", settings, packer)
    built(tmp_path, target="cuda/sm90,ref")
    cuda, ref = (read_plan(tmp_path / "engine", target=each) for each in ("cuda/sm90", "ref"))
    codes = [{each.name: each for each in plan.weights if each.dtype is DType.W4TS} for plan in (cuda, ref)]
    assert codes[0] == codes[1] != {}
    assert read_manifest(tmp_path / "engine").precision == "w4tsg32"


def test_machine_code_has_the_formats_of_the_engine_alone(tmp_path: Path) -> None:
    """And an estimate counts the bytes of the codes."""
    settings, packer, _ = CASES["ct nvfp4"]
    write.write_model(tmp_path / "model", settings, packer)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    plan = build(BuildConfig(target="cuda/sm90", dry_run=True), tmp_path / "checkpoint", tmp_path / "engine").plan
    types = specialisation(plan)
    assert types.codes == (DType.W4T, DType.W8)
    assert {each for each in types.macros if "CODES" in each} == {
        "-DINGOT_CODES",
        "-DINGOT_CODES_W4T",
        "-DINGOT_CODES_W8",
    }
    weights = {each.name: each for each in plan.weights}
    (device, *_) = devices_of("sm_90a")
    found = [each for each in step_ops(plan, device, Load(sequences=[(0, 1)], logit_rows=1)) if each.op == "matmul"]
    products = [step for step in plan.steps if step.op == "matmul"]
    kernels = {step.kernel.split(".")[1] for step in products}
    assert kernels == {"w4t", "w8"}
    for each, step in zip(found, products, strict=True):
        (kernel,) = each.kernels[-1:]
        assert kernel.startswith(f"product_{step.kernel.split('.')[1]}_8")
        nbytes = weights[step.inputs[1]].nbytes
        assert nbytes <= each.nbytes <= nbytes + 4 * 6 * write.INNER, "the panels, and a few rows of activations"
    prompt = Load(sequences=[(0, 20)], logit_rows=1)
    seen = {name for each in step_ops(plan, device, prompt) for name in each.kernels if name.startswith("product_")}
    assert {"product_w4t_wide_64"} <= seen, "warpgroups compute more than a few rows"
    assert not {"product_w4t_64", "product_w4t_128"} & seen
