"""Engines that keep the codes of a quantised checkpoint, as users build them: bits in every company, references."""

from pathlib import Path

import numpy as np
import pytest

from ingot.engine import read_manifest
from ingot.runtime.model_runner import ModelRunner
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.convert.quantised.test_formats import CASES
from tests.e2e.command import ingot
from tests.e2e.test_quantised import bits

KINDS = [("awq g32", "int8"), ("awq g32", "bf16"), ("ct nvfp4", "int8"), ("hqq 4 bits", "int8")]
KINDS += [("fp8 blocks of 32 columns", "bf16"), ("bnb nf4", "int8"), ("bnb fp4", "bf16")]
KINDS += [("gptq v1 asymmetric, desc_act", "int8"), ("ct 4 bits asymmetric, actorder", "bf16")]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, activations = request.param
    folder = tmp_path_factory.mktemp(activations)
    settings, packer, _ = CASES[name]
    write.write_model(folder / "model", settings, packer)
    ingot("convert", "--model_dir", folder / "model", "--output_dir", folder / "checkpoint").succeeds()
    options = ("--activations", activations, "--tokens_per_block", 16, "--kv_cache_dtype", "f32")
    args = ("--checkpoint_dir", folder / "checkpoint", "--output_dir", folder / "engine")
    done = ingot("build", *args, *options).succeeds()
    assert "keep their codes" in done.out + done.err
    assert read_manifest(folder / "engine").precision.startswith(("w4t", "f8"))
    return folder / "engine"


@pytest.mark.daily(1)
def test_no_bit_depends_on_the_company(engine: Path) -> None:
    random = np.random.default_rng(4)
    prompts = [random.integers(0, write.VOCAB, length).tolist() for length in (1, 30, 17, 5)]
    with ModelRunner.from_dir(engine) as runner:
        alone = [bits(runner, [prompt])[0] for prompt in prompts]
        assert bits(runner, prompts) == alone
    with ModelRunner.from_dir(engine, max_num_tokens=7, threads=3) as runner:
        assert bits(runner, prompts) == alone


@pytest.mark.daily(4)
def test_kernels_follow_the_references(engine: Path) -> None:
    ids = np.random.default_rng(6).integers(0, write.VOCAB, (2, 30))
    expected = engine_logits(engine, ids)
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(ids.tolist(), max_new_tokens=1, return_dict=True, output_context_logits=True)
    assert np.abs(np.stack(out["context_logits"]) - expected).max() < 5e-3 * np.ptp(expected)


@pytest.mark.daily(2)
def test_verify_holds_it_against_its_source(engine: Path) -> None:
    ingot("verify", engine, "--against", engine.with_name("model"), "--tokens", 24).succeeds()
