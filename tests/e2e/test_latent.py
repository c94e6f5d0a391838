"""Latent attention from one end to the other: the same bits in chunks, in company, after prefix hits and preemption, on
every target that runs here; what a token takes of memory; quantised engines beside the exact one.
"""

from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.families.deepseek_v3 import FAMILY
from ingot.convert.families.deepseek_v32 import FAMILY as SPARSE
from ingot.engine import read_plan
from ingot.errors import BuildError, NoKernelError, UsageError
from ingot.inspect import inspect
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import Request
from tests.e2e.same_bits import (
    COLD,
    HEADS,
    OWN_KERNELS,
    SIZE,
    build_for_all,
    check_chunks,
    opened,
    prompts_of,
    random_checkpoint,
)
from tests.runtime.test_bit_identity import generations
from tests.runtime.tiny_engine import make_loop, open_session, poisoned_runner
from tests.runtime.tiny_plan import TinyModel
from tests.tiny import tiny_model

LONGEST = 128
LAYERS, ROW = 3, 20 + 8  # kv_lora_rank and qk_rope_head_dim


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("latent"), FAMILY.tiny)


@pytest.fixture(scope="module", params=OWN_KERNELS)
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Path:
    return built(checkpoint, str(request.param))


@pytest.fixture(params=[(precision, name) for precision, names in OWN_KERNELS.items() for name in names], ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A precision and a target."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def target(pair: tuple[str, str]) -> Target:
    return find_target(pair[1])


@pytest.fixture
def model(checkpoint: Path, pair: tuple[str, str], target: Target) -> TinyModel:
    return opened(built(checkpoint, pair[0]), target)


def built(checkpoint: Path, precision: str) -> Path:
    folder = checkpoint.parent / precision
    return folder if folder.exists() else build_for_all(checkpoint, folder, precision, LONGEST)


@pytest.mark.daily(1)
def test_chunks_and_company_change_no_bit(model: TinyModel, target: Target) -> None:
    check_chunks(model, target, 60)


@pytest.mark.slow
def test_prefix_hits_and_preemption_change_no_bit(model: TinyModel, target: Target) -> None:
    for head in HEADS:
        prompts, calm = prompts_of(5, 11, 3, head=head), []
        for prompt in prompts:
            with poisoned_runner(model, target, 60, config=COLD) as runner:
                calm += generations(runner, [prompt])
        with poisoned_runner(model, target, 60, seed=head) as runner:
            assert [generations(runner, [prompt])[0] for prompt in prompts] == calm, f"{head} tokens in common"
            assert runner.stats()["prefix_hit_tokens"] >= 2 * head
    prompts = prompts_of(2, 9, 5, 1, head=17)
    with poisoned_runner(model, target, 200) as runner:
        calm = generations(runner, prompts, 36)
    with poisoned_runner(model, target, 8) as runner:
        assert generations(runner, prompts, 36) == calm
        assert runner.stats()["preemptions"] > 0
        assert runner.stats()["blocks_used"] == 0


@pytest.mark.daily(1)
def test_preemption_at_every_token_changes_no_bit(model: TinyModel, target: Target) -> None:
    prompt, found = prompts_of(21)[0], []
    for preempts in (False, True):
        session = open_session(model, target, 12)
        loop, scheduler, _ = make_loop(session, model.plan.limits, SIZE)
        request = Request(np.array(prompt, np.int32), max_new_tokens=40)
        loop.add([request])
        while loop.step():
            if preempts and request in scheduler.running:
                scheduler.preempt([request])
        session.close()
        assert scheduler.preemptions > 35 if preempts else scheduler.preemptions == 0
        found.append((request.generated().tolist(), request.log_probs))
    assert found[0] == found[1]


def test_64_requests_at_once(model: TinyModel, target: Target) -> None:
    if target.name == "ref":
        return  # the kernels' own arithmetic is at stake
    prompts, alone = prompts_of(*range(1, 65)), []
    with poisoned_runner(model, target, 400, config=COLD) as runner:
        for prompt in prompts:
            alone += generations(runner, [prompt], 4)
    with poisoned_runner(model, target, 400, config=COLD) as runner:
        assert generations(runner, prompts, 4) == alone


def test_a_token_takes_its_latent_alone(engine: Path) -> None:
    (group,) = read_plan(engine).caches
    assert group.block_bytes == LAYERS * SIZE * ROW * group.dtype.itemsize
    assert (group.kv_heads, group.head_dim, group.latent) == (1, ROW, 20)
    bytes_per_token = LAYERS * ROW * group.dtype.itemsize
    assert f"{bytes_per_token} bytes a token" in str(inspect(engine))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bound"), [("w8", 0.02), ("w4g32", 0.12)])
def test_quantised_engines_are_near(precision: str, bound: float, checkpoint: Path) -> None:
    """The weights of heads, which are few, keep what they were; so do those of the router."""
    found, prompt = [], prompts_of(60)[0]
    for each in ("f32", precision):
        folder = checkpoint.parent / f"{each}_cpu"
        if not folder.exists():
            build(BuildConfig(target="cpu", precision=each, tokens_per_block=SIZE), checkpoint, folder)
        with ModelRunner.from_dir(folder) as runner:
            out = runner.generate([prompt], max_new_tokens=1, return_dict=True, output_context_logits=True)
            found.append(out["context_logits"][0])
    error = np.sqrt(np.mean((found[0] - found[1]) ** 2)) / np.std(found[0])
    assert 0 < error < bound
    kernels = {step.op: step.kernel for step in read_plan(folder).steps}
    assert kernels["head_matmul"].split(".")[1] in ("f32", "bf16")


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_cache_of_codes_is_refused(kv: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"8 bits is not supported for latent attention(.|\n)*kv_cache_dtype"):
        build(BuildConfig(target="cpu", precision="bf16", kv_cache_dtype=kv), checkpoint, tmp_path / "e")


@pytest.mark.slow
def test_what_chooses_tokens_is_left_out_and_longer_texts_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "m", dict(SPARSE.tiny))
    warnings = convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "c")).warnings
    assert any("15 tensors that choose tokens for sparse attention are left out" in each for each in warnings)
    assert any("72 of 256 positions" in each and "sparse attention" in each for each in warnings)
    with pytest.raises(UsageError, match=r"at most 73(.|\n)*sparse attention"):
        build(BuildConfig(target="cpu", max_seq_len=100), tmp_path / "c", tmp_path / "e")
    report = build(BuildConfig(target="cpu", autotune=False), tmp_path / "c", tmp_path / "e")
    assert any("max_seq_len lowered" in each and "sparse attention" in each for each in report.lowered)
    assert read_plan(tmp_path / "e").limits.max_seq_len == 73


def test_tensorrt_refuses_it(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(NoKernelError, match="head_matmul"):
        build(BuildConfig(target="tensorrt-rtx", precision="bf16", dry_run=True), checkpoint, tmp_path / "e")
