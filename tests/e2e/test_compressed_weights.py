"""Engines of bf16 weights in 12 bits: smaller, and the same bits as those in 16."""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.configs.runtime import runtime_config
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import read_plan
from ingot.plan import Plan
from ingot.plugins.compressed import CompressedPanel
from ingot.plugins.cpu.native import offered_isas
from ingot.plugins.registry import find_op
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import load_engine
from tests.e2e.command import ingot
from tests.hall.planted import Bytes, Edit, panel, replant
from tests.handmade import TINY_LLAMA, random_tensors, write_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif("avx512bf16" not in offered_isas(), reason="this machine lacks avx512bf16"),
]

MODEL = {**TINY_LLAMA, "vocab_size": 1000, "hidden_size": 160, "intermediate_size": 300, "num_hidden_layers": 2}
MIXTURE = {
    **find_family("qwen3_moe").tiny,
    **{"vocab_size": 1000, "hidden_size": 160, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 90},
}
PROMPTS = [np.random.default_rng(n).integers(3, 1000, 5 + 4 * n).tolist() for n in range(12)]
TARGET = ("--target", "cpu/avx512bf16", "--precision", "bf16", "--no_autotune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c: a Checkpoint; plain, compressed, refit, and ranks, which has two: engines."""
    folder = tmp_path_factory.mktemp("compressed")
    model = write_model(folder / "m", MODEL)
    ingot("convert", "--model_dir", model, "--dtype", "bfloat16", "--output_dir", folder / "c").succeeds()
    engines = {
        "compressed": (),
        "plain": ("--no_compression",),
        "refit": ("--refit", "--activations", "bf16"),
        "ranks": ("--tp_size", "2"),
        "parts": ("--sum_parts", "2"),
    }
    for name, options in engines.items():
        ingot("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / name, *TARGET, *options).succeeds()
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a mixture of experts: c, plain, compressed and ranks."""
    folder = tmp_path_factory.mktemp("mixture")
    model = write_model(folder / "m", MIXTURE, dtype=DType.BF16)
    ingot("convert", "--model_dir", model, "--output_dir", folder / "c").succeeds()
    for name, options in {"compressed": (), "plain": ("--no_compression",), "ranks": ("--tp_size", "2")}.items():
        ingot("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / name, *TARGET, *options).succeeds()
    return folder


def answers(engine: Path) -> tuple[list[list[int]], list[bytes]]:
    """Tokens and logits, of many sequences at once and then of one."""
    with ModelRunner(load_engine(engine, runtime_config(threads=2))) as runner:
        made = [
            runner.generate(prompts, max_new_tokens=12, end_id=-1, return_dict=True, output_generation_logits=True)
            for prompts in (PROMPTS, PROMPTS[:1])
        ]
    return [each["output_ids"].tolist() for each in made], [each["generation_logits"].tobytes() for each in made]


def dtypes(engine: Path, rank: int = 0) -> dict[str, DType]:
    """Of the weights of matmuls and experts."""
    plan = read_plan(engine, rank)
    types = {weight.name: weight.dtype for weight in plan.weights}
    packed = [(step, find_op(step.op).packed) for step in plan.steps]
    return {step.name: types[step.inputs[at]] for step, at in packed if at is not None}


def test_the_same_bits(folder: Path) -> None:
    assert set(dtypes(folder / "compressed").values()) == {DType.BF16C}
    assert set(dtypes(folder / "plain").values()) == {DType.BF16}
    assert answers(folder / "compressed") == answers(folder / "plain")


def test_fewer_bytes(folder: Path) -> None:
    matmuls = [
        sum(weight.nbytes for weight in read_plan(folder / name).weights if weight.layout.startswith("panel"))
        for name in ("compressed", "plain")
    ]
    assert matmuls[0] < 0.78 * matmuls[1]


@pytest.mark.parametrize("name", ["compressed", "ranks", "parts"])
def test_verify_finds_every_weight(folder: Path, name: str) -> None:
    ingot("verify", folder / name, "--against", folder / "c").succeeds()


def lower_byte(plan: Plan, section: Bytes) -> None:
    """That of row 16, column 0, the first of the panel."""
    panel(plan, section, "layers.1/down.weight", 21)[CompressedPanel(300).header_bytes + 64] ^= 1


def upper_byte(plan: Plan, section: Bytes) -> None:
    """What one code of the panel stands for."""
    panel(plan, section, "layers.1/down.weight", 21)[3] ^= 1


def counts(plan: Plan, section: Bytes) -> None:
    """Patches before each tile: more than there is room for, then fewer."""
    part = panel(plan, section, "layers.1/down.weight", 21)
    header = CompressedPanel(300).header_bytes
    part[header - 22 : header].view(np.uint16)[:] = np.arange(11) * 7 % 5 * 9000


@pytest.mark.parametrize("edit", [lower_byte, upper_byte, counts])
def test_verify_names_a_weight_with_other_bytes(folder: Path, tmp_path: Path, edit: Edit) -> None:
    engine = replant(folder / "compressed", tmp_path / "e", edit)
    result = ingot("verify", engine, "--against", folder / "c")
    assert result.code == 1
    assert re.search(r"weight layers.1/down.weight, row (16|19|2\d|3[01]), column", result.err), result.err


def test_inspect_names_them(folder: Path) -> None:
    assert "bf16c" in ingot("inspect", folder / "compressed").succeeds().out


def test_a_refit_may_bring_other_exponents(folder: Path) -> None:
    """So its weights are not compressed."""
    assert set(dtypes(folder / "refit").values()) == {DType.BF16}


def wild_from(bits: npt.NDArray[np.generic], row: int) -> npt.NDArray[np.uint16]:
    """The same numbers; from that row on with other exponents."""
    wild = bits.view(np.uint16).copy()
    exponents = np.random.default_rng(1).integers(1, 120, wild[row:].shape)
    wild[row:] = (wild[row:] & 0x807F | exponents << 7).astype(np.uint16)
    return wild


def dtypes_with_wild(folder: Path, config: dict[str, object], name: str, row: int) -> list[dict[str, DType]]:
    """Of one rank, then of each of two, if that weight is wild from that row on. `verify` finds every weight."""
    tensors = random_tensors(config, dtype=DType.BF16)
    tensors[name] = (DType.BF16, wild_from(tensors[name][1], row))
    model = write_model(folder / "m", config, tensors=tensors)
    ingot("convert", "--model_dir", model, "--output_dir", folder / "c").succeeds()
    for engine, options in (("one", ()), ("two", ("--tp_size", "2"))):
        build = ("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / engine)
        ingot(*build, *TARGET, *options).succeeds()
        ingot("verify", folder / engine, "--against", folder / "c").succeeds()
    return [dtypes(folder / "one"), dtypes(folder / "two"), dtypes(folder / "two", rank=1)]


def test_a_weight_with_too_many_exponents_stays_in_16_bits(tmp_path: Path) -> None:
    """Of one rank: the other one has the first rows of the up projection."""
    found = dtypes_with_wild(tmp_path, MODEL, "model.layers.0.mlp.up_proj.weight", 150)
    assert [each.pop("layers.0/gate_up") for each in found] == [DType.BF16, DType.BF16C, DType.BF16]
    assert {dtype for each in found for dtype in each.values()} == {DType.BF16C}


def test_experts_have_the_same_bits(mixture: Path) -> None:
    found = dtypes(mixture / "compressed")
    assert found["layers.2/moe_gate_up"] is found["layers.2/moe_down"] is DType.BF16C
    assert DType.BF16C not in dtypes(mixture / "plain").values()
    assert answers(mixture / "compressed") == answers(mixture / "plain")


@pytest.mark.parametrize("name", ["compressed", "ranks"])
def test_verify_finds_every_expert(mixture: Path, name: str) -> None:
    found = [dtype for step, dtype in dtypes(mixture / name).items() if "/moe_" in step]
    assert set(found) == {DType.BF16C}
    ingot("verify", mixture / name, "--against", mixture / "c").succeeds()


def test_verify_names_an_expert_with_other_bytes(mixture: Path, tmp_path: Path) -> None:
    def edit(plan: Plan, section: Bytes) -> None:
        panel(plan, section, "layers.2/moe_down.weight", 21, expert=4)[CompressedPanel(90).header_bytes + 64] ^= 1

    engine = replant(mixture / "compressed", tmp_path / "e", edit)
    result = ingot("verify", engine, "--against", mixture / "c")
    assert result.code == 1
    assert "weight layers.2/moe_down.weight, expert 4, row 16, column 0" in result.err, result.err


def test_an_expert_with_too_many_exponents_keeps_the_others_in_16_bits(tmp_path: Path) -> None:
    """Its last rows, which the second of two ranks has."""
    found = dtypes_with_wild(tmp_path, MIXTURE, "model.layers.0.mlp.experts.3.gate_proj.weight", 60)
    assert [each["layers.0/moe_gate_up"] for each in found] == [DType.BF16, DType.BF16C, DType.BF16]
    assert {dtype for each in found for step, dtype in each.items() if "/moe_down" in step} == {DType.BF16C}
