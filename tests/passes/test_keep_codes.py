"""Products are taken apart, and columns put in order, where codes are kept only so."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import BuildReport, build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.recipe import LayerRule
from ingot.convert.convert import convert
from ingot.errors import UsageError
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.builder.test_kept import products
from tests.convert.gguf.test_architectures import CASES, write_case
from tests.convert.gguf.test_blocks import IDS, write_llama
from tests.convert.quantised.test_formats import GPTQ
from tests.gguf_files import random_blocks
from tests.graph_logits import logits_of_graph

Q4_K, Q6_K = 12, 14
SETTINGS = {**GPTQ, "bits": 4, "group_size": 32, "sym": False}


def convert_gptq(folder: Path, *, same_order: bool = True, bits: int = 4) -> None:
    packer = write.gptq(bits, 32, shuffled=True, same_order=same_order)
    write.write_model(folder / "model", {**SETTINGS, "bits": bits}, packer)
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))


def built(folder: Path, **options: object) -> BuildReport:
    usual: dict[str, Any] = {"target": "ref", "activations": "bf16", "kv_cache_dtype": "f32"}
    config = BuildConfig(**{**usual, **options})
    return build(config, folder / "checkpoint", folder / "engine")


def fired(report: BuildReport) -> int:
    return sum(each.fired for each in report.passes if each.name == "keep_codes")


def inputs_of(report: BuildReport, op: str) -> list[str]:
    """Names of the steps of an op."""
    return [step.name for step in report.plan.steps if step.op == op]


def error(folder: Path, ids: np.ndarray) -> float:
    """Of the engine's logits, relative to the range of the graph's."""
    exact = logits_of_graph(folder / "checkpoint", ids)
    return float(np.abs(engine_logits(folder / "engine", ids) - exact).max() / np.ptp(exact))


def test_columns_of_one_order_are_gathered_once(tmp_path: Path) -> None:
    """q, k and v stay one product, gate and up too; the codes are kept, and the numbers are those of the source. The
    token table is w8, so that the tolerance is that of w8."""
    convert_gptq(tmp_path)
    report = built(tmp_path)
    names = ("qkv", "attention_out", "gate_up", "down")
    assert products(report) == {f"layers.0/{name}.weight": ("w4tsg32", 0.0) for name in names}
    assert inputs_of(report, "gather_columns") == [f"layers.0/{name}_columns" for name in names]
    assert fired(report) == 4
    assert error(tmp_path, IDS % write.VOCAB) < 0.02


def test_members_of_different_orders_are_taken_apart(tmp_path: Path) -> None:
    convert_gptq(tmp_path, same_order=False)
    report = built(tmp_path)
    found = products(report)
    names = ("q", "k", "v", "attention_out", "gate", "up", "down")
    assert found == {f"layers.0/{name}.weight": ("w4tsg32", 0.0) for name in names}
    assert len(inputs_of(report, "gather_columns")) == len(names)
    assert inputs_of(report, "join_columns") == ["layers.0/qkv"]
    assert inputs_of(report, "activation") == ["layers.0/gate_up_activation"]
    assert error(tmp_path, IDS % write.VOCAB) < 0.02


def test_bytes_are_gathered_too(tmp_path: Path) -> None:
    convert_gptq(tmp_path, bits=8)
    report = built(tmp_path)
    assert set(products(report).values()) == {("w8tsg32", 0.0)}
    assert fired(report) == 4
    assert error(tmp_path, IDS % write.VOCAB) < 0.02


def test_an_order_of_codes_that_are_not_kept_stays(tmp_path: Path) -> None:
    """No format has groups of 24."""
    packer = write.gptq(4, 24, shuffled=True)
    write.write_model(tmp_path / "model", {**SETTINGS, "group_size": 24}, packer)
    convert(ConvertOptions(model_dir=tmp_path / "model", output_dir=tmp_path / "checkpoint"))
    report = built(tmp_path)
    assert {precision for precision, _ in products(report).values()} == {"w8"}
    assert not fired(report)


def test_two_gates_of_one_name(tmp_path: Path) -> None:
    """Both MLPs of this model count as its first layer's."""
    rng, kinds = np.random.default_rng(0), {"gate": 8, "up": 2}
    given = {
        f"blk.{layer}.ffn_{name}.weight": random_blocks(rng, kind, (64, 64))[0]
        for layer in range(2)
        for name, kind in kinds.items()
    }
    case = dataclasses.replace(
        CASES["command-r"],
        change={"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    )
    path, _ = write_case(tmp_path, "command-r", case, given)
    convert(ConvertOptions(model_dir=path, output_dir=tmp_path / "checkpoint"))
    report = built(tmp_path)
    names = [name for name in inputs_of(report, "matmul") if "gate" in name or "up" in name]
    assert names == ["layers.0/gate", "layers.0/up", "layers.0/gate.2", "layers.0/up.2"]
    assert error(tmp_path, IDS % 61) < 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"refit": True},  # new weights may come in another order
        {"precision": "w8"},
        {"layers": (LayerRule(pattern="layers.*", precision="w8"),)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_where_products_stay_whole(tmp_path: Path, options: dict[str, object]) -> None:
    convert_gptq(tmp_path)
    report = built(tmp_path, **options)
    assert {precision for precision, _ in products(report).values()} == {"w8"}
    assert not fired(report)


def test_each_target_takes_its_own_products_apart(tmp_path: Path) -> None:
    """TensorRT targets have no kernels for codes that are kept."""
    convert_gptq(tmp_path, same_order=False)
    targets = "ref,tensorrt/sm90,cuda/sm90,cpu/avx2"
    report = built(tmp_path, target=targets, activations="auto", kv_cache_dtype="auto", dry_run=True)
    names = [{step.name for step in each.plan.steps if step.op == "matmul"} for each in report.targets]
    assert [name[9:] for name in sorted(names[1]) if "/" in name] == ["attention_out", "down", "gate_up", "qkv"]
    assert names[0] == names[2] == names[3] >= {f"layers.0/{name}" for name in ("q", "k", "v", "gate", "up")}


@pytest.mark.slow
def test_a_mixture_of_k_quants(tmp_path: Path) -> None:
    """As in Q4_K_M: v and down have six bits. q and k keep their four."""
    write_llama(tmp_path, Q4_K, kinds={"attn_v": Q6_K, "ffn_down": Q6_K})
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    report = built(tmp_path)
    found = {name: precision for name, (precision, _) in products(report).items()}
    del found["layers.0/attention_out.weight"]  # of float16 here
    assert found == {
        "layers.0/qk.weight": "w4ksg32",
        "layers.0/v.weight": "w6kg16",
        "layers.0/gate_up.weight": "w4ksg32",
        "layers.0/down.weight": "w6kg16",
    }
    assert inputs_of(report, "join_columns") == ["layers.0/qkv"]
    assert error(tmp_path, IDS) < 0.05


@pytest.mark.slow
def test_a_gate_and_an_up_of_different_formats(tmp_path: Path) -> None:
    write_llama(tmp_path, Q4_K, kinds={"ffn_up": Q6_K})
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    report = built(tmp_path)
    found = {name: precision for name, (precision, _) in products(report).items()}
    assert (found["layers.0/gate.weight"], found["layers.0/up.weight"]) == ("w4ksg32", "w6kg16")
    assert error(tmp_path, IDS) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "four", "six"),
    [({"sum_parts": 2}, "w4tsg32", "w8tg16"), ({"refit": True}, "w4ksg32", "w6kg16")],
    ids=["sum_parts", "refit"],
)
def test_mixtures_are_kept_with_every_option(tmp_path: Path, options: dict[str, object], four: str, six: str) -> None:
    """v has six bits, gate and up have other formats: each keeps its own. Parts of a row's sum may cut its units."""
    write_llama(tmp_path, Q4_K, kinds={"attn_v": Q6_K, "ffn_up": Q6_K})
    convert(ConvertOptions(model_dir=tmp_path / "model.gguf", output_dir=tmp_path / "checkpoint"))
    found = {name: precision for name, (precision, _) in products(built(tmp_path, **options)).items()}
    for name, precision in (("qk", four), ("v", six), ("gate", four), ("up", six)):
        assert found[f"layers.0/{name}.weight"] == precision
    assert error(tmp_path, IDS) < 0.05


def test_columns_in_order_are_no_sum_in_parts(tmp_path: Path) -> None:
    """Ranks put the inputs of such products together, and divide their rows."""
    convert_gptq(tmp_path)
    report = built(tmp_path, sum_parts=2)
    names = [f"layers.0/{name}" for name in ("qkv", "attention_out", "gate_up", "down")]
    assert inputs_of(report, "gather_columns") == [f"{name}_columns" for name in names]
    found = {name: precision for name, (precision, _) in products(report).items()}
    assert {found[f"{name}.weight"] for name in names} == {"w4tsg32"}
    assert not [name for name in found if ".part" in name]
    assert error(tmp_path, IDS % write.VOCAB) < 0.02


@pytest.mark.parametrize("pattern", ["layers.*/qkv", "layers.*/v"])
def test_a_pattern_names_the_whole_or_a_part(tmp_path: Path, pattern: str) -> None:
    convert_gptq(tmp_path, same_order=False)
    report = built(tmp_path, activations="auto", layers=(LayerRule(pattern=pattern, activations="f32"),))
    steps = {step.name: step for step in report.plan.steps}
    chosen = {part: steps[f"layers.0/{part}"].attrs["activations"] for part in "qkv"}
    assert chosen == {part: "f32" if part in pattern.rpartition("/")[2] else "int8" for part in "qkv"}
    assert {products(report)[f"layers.0/{part}.weight"] for part in "qkv"} == {("w4tsg32", 0.0)}


def test_a_pattern_that_fits_neither_is_refused(tmp_path: Path) -> None:
    convert_gptq(tmp_path, same_order=False)
    with pytest.raises(UsageError, match="fits no matmul"):
        built(tmp_path, layers=(LayerRule(pattern="layers.*/w", activations="bf16"),))
