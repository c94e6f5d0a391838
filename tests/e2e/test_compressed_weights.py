"""Engines of bf16 weights in 12 bits: smaller, and the same bits as those in 16."""

import re
from pathlib import Path

import numpy as np
import pytest

from ingot.configs.runtime import runtime_config
from ingot.dtypes import DType
from ingot.engine import read_plan
from ingot.plan import Plan
from ingot.plugins.compressed import CompressedPanel
from ingot.plugins.cpu.native import offered_isas
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


def answers(engine: Path) -> tuple[list[list[int]], list[bytes]]:
    """Tokens and logits, of many sequences at once and then of one."""
    with ModelRunner(load_engine(engine, runtime_config(threads=2))) as runner:
        made = [
            runner.generate(prompts, max_new_tokens=12, end_id=-1, return_dict=True, output_generation_logits=True)
            for prompts in (PROMPTS, PROMPTS[:1])
        ]
    return [each["output_ids"].tolist() for each in made], [each["generation_logits"].tobytes() for each in made]


def dtypes(engine: Path, rank: int = 0) -> dict[str, DType]:
    """Of the weights of matmuls."""
    plan = read_plan(engine, rank)
    types = {weight.name: weight.dtype for weight in plan.weights}
    return {step.name: types[step.inputs[1]] for step in plan.steps if step.op == "matmul"}


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


def test_a_weight_with_too_many_exponents_stays_in_16_bits(folder: Path, tmp_path: Path) -> None:
    """Of one rank: the other one has the first rows of the up projection."""
    tensors = random_tensors(MODEL, dtype=DType.BF16)
    name = "model.layers.0.mlp.up_proj.weight"
    bits = tensors[name][1].view(np.uint16)
    exponents = np.random.default_rng(1).integers(1, 120, bits[150:].shape)
    wild = bits.copy()
    wild[150:] = (bits[150:] & 0x807F | exponents << 7).astype(np.uint16)
    model = write_model(tmp_path / "m", MODEL, tensors={**tensors, name: (DType.BF16, wild)})
    ingot("convert", "--model_dir", model, "--output_dir", tmp_path / "c").succeeds()
    for engine, options in (("one", ()), ("two", ("--tp_size", "2"))):
        build = ("build", "--checkpoint_dir", tmp_path / "c", "--output_dir", tmp_path / engine)
        ingot(*build, *TARGET, *options).succeeds()
        ingot("verify", tmp_path / engine, "--against", tmp_path / "c").succeeds()
    found = [dtypes(tmp_path / "one"), dtypes(tmp_path / "two"), dtypes(tmp_path / "two", rank=1)]
    assert [each.pop("layers.0/gate_up") for each in found] == [DType.BF16, DType.BF16C, DType.BF16]
    assert {dtype for each in found for dtype in each.values()} == {DType.BF16C}
