"""Models that amplify every rounding, experts that are nearly as good as others, NaN and infinities: a sound engine
passes, and a fault is found all the same."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.builder.evaluate import Evaluation, Float64
from ingot.builder.source import open_source
from ingot.compare.compare import compare
from ingot.compare.logit_metrics import LogitMeter
from ingot.compare.report import Finding
from ingot.compare.taps import TappedRun
from ingot.compare.walk import relative
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.engine import open_engine
from ingot.errors import EngineError
from ingot.plan import Plan
from ingot.plugins.op import Array
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from tests.hall.planted import Bytes, Edit, panel, replant, step_named, with_attr
from tests.hall.test_compare import LLAMA, OPTIONS, Built, built, run_on
from tests.hall.wrong_kernel import WrongKernel
from tests.handmade import random_tensors, write_model
from tests.spanning import spanning, values

MIXTRAL = {**find_family("mixtral").tiny, "num_hidden_layers": 4}
NAN, INF = float("nan"), float("inf")
STEPS = ("embed", "layers.0/qkv", "layers.0/rope_kv_write", "layers.1/attention", "lm_head")


def changed(
    folder: Path, config: Mapping[str, object], gain: float = 1.0, spoiled: Mapping[str, float] = MappingProxyType({})
) -> Built:
    """Weights are `gain` times as large as usual; where a name ends with one in `spoiled`, one value is another."""
    tensors = random_tensors(config, seed=1)
    for name, (dtype, bits) in tensors.items():
        if bits.ndim > 1:
            tensors[name] = dtype, (bits.astype(np.float32) * np.float32(gain))
        for place, value in spoiled.items():
            if name.endswith(place):
                tensors[name][1].reshape(-1)[min(70, bits.size - 1)] = value
    model = write_model(folder / "model", config, tensors=tensors)
    convert(ConvertOptions(model_dir=model, output_dir=folder / "checkpoint"))
    return Built(folder=folder)


@pytest.fixture(scope="module")
def chaotic(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Attention takes one token, and most tokens get other experts than in float32."""
    return changed(tmp_path_factory.mktemp("chaotic"), MIXTRAL, gain=10)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return changed(tmp_path_factory.mktemp("llama"), find_family("llama").tiny)


def found_with(model: Built, kind: str, step: str, spoil: Callable[[Array], Array]) -> Sequence[Finding]:
    """What is found of an engine one of whose kernels is wrong."""
    with open_engine(model.engine(kind)) as opened:
        session = WrongKernel(opened.plan, opened.weights, SessionOptions(num_blocks=opened.plan.in_each(8)))
        session.wrong, session.spoil = step, spoil
        return run_on(session, model.engine(kind), model.checkpoint).findings


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", ["cpu-w4g32", "cpu-bf16-int8"])
def test_a_sound_engine_of_a_chaotic_model(kind: str, chaotic: Built) -> None:
    comparison = compare(chaotic.engine(kind), chaotic.checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    shares = {step.name: step.model_error / step.model_bound for step in comparison.steps if step.model_error}
    if kind == "cpu-w4g32":
        nearest = max(share for name, share in shares.items() if name.endswith("/attention"))
        assert 0.2 < nearest < 0.6, "errors are about as large as noise of the roundings' size makes: a third"
    assert max(shares.values()) < 0.6


@pytest.mark.slow
def test_figures_are_those_of_the_source_by_itself(chaotic: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own experts and its own values, whatever the engine took."""
    seen: list[tuple[Array, Array]] = []
    monkeypatch.setattr(LogitMeter, "add", lambda self, ids, engine, source: seen.append((ids, source)))
    monkeypatch.setattr(LogitMeter, "metrics", lambda self: None)
    compare(chaotic.engine("cpu-w4g32"), chaotic.checkpoint, OPTIONS)
    ((ids, own),) = seen
    with (
        open_engine(chaotic.engine("cpu-w4g32")) as opened,
        open_source(chaotic.checkpoint, opened.plan, find_target("cpu/avx2")) as source,
    ):
        expected = source.evaluate(ids.astype(np.int64), {source.logits}, 1).value(source.logits)
    np.testing.assert_allclose(own, expected.reshape(own.shape), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "count"), [(0.9e-4, 0), (1.1e-4, 1)])
def test_near_ties_between_experts(lost: float, count: int, chaotic: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the second layer takes experts that weigh so much less."""
    choice = Evaluation.choice

    def other(self: Evaluation, logits: str) -> Float64:
        found = choice(self, logits)
        found[1, -1] = lost if "layers.1/" in logits else 0
        return found

    monkeypatch.setattr(Evaluation, "choice", other)
    findings = compare(chaotic.engine("cpu-w8"), chaotic.checkpoint, OPTIONS).findings
    assert [finding.step for finding in findings] == ["layers.1/moe_route"] * count


def test_what_int8_inputs_lose_is_no_fault(tmp_path: Path) -> None:
    """Weights are multiples of 2^-8 up to 127 of them, which w8 holds exactly: nothing else is rounded."""
    config = find_family("llama").tiny
    tensors = random_tensors(config, seed=1)
    for name, (dtype, bits) in tensors.items():
        if bits.ndim > 1:
            codes = np.clip(np.rint(bits.astype(np.float32) * 256), -127, 127)
            codes[:, 0] = 127
            tensors[name] = dtype, (codes / 256).astype(np.float32)
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", config, tensors=tensors), output_dir=tmp_path / "c"))
    build(BuildConfig(target="ref", precision="w8", activations="int8"), tmp_path / "c", tmp_path / "e")
    comparison = compare(tmp_path / "e", tmp_path / "c", OPTIONS)
    comparison.raise_if_wrong()
    assert max(step.weight_error for step in comparison.steps) < 1e-7
    assert (comparison.worst_step.model_error or 0) > 1e-3


def test_what_an_int8_cache_loses_of_keys_with_much_in_common_is_no_fault(tmp_path: Path) -> None:
    """Large biases: the cache rounds them with the keys, and noise on what the keys are made of does not reach them."""
    config = find_family("qwen2").tiny
    tensors = random_tensors(config, seed=1)
    for name, (dtype, bits) in tensors.items():
        if name.endswith("k_proj.bias"):
            tensors[name] = dtype, np.full(bits.shape, 100, np.float32)
        if name.endswith("q_proj.bias"):
            tensors[name] = dtype, 3 * np.random.default_rng(0).standard_normal(bits.shape, np.float32)
    convert(ConvertOptions(model_dir=write_model(tmp_path / "m", config, tensors=tensors), output_dir=tmp_path / "c"))
    build(BuildConfig(target="ref", precision="f32", kv_cache_dtype="int8"), tmp_path / "c", tmp_path / "e")
    comparison = compare(tmp_path / "e", tmp_path / "c", OPTIONS)
    comparison.raise_if_wrong()
    (share,) = (
        (step.model_error or 0) / step.model_bound for step in comparison.steps if step.name == "layers.0/attention"
    )
    assert 0.3 < share < 0.4, "the error is that of the rounding: a third of the bound"


@pytest.mark.slow
def test_a_sound_engine_of_sharp_attention(tmp_path: Path) -> None:
    model = changed(tmp_path, {**find_family("llama").tiny, "num_hidden_layers": 5}, gain=10)
    compare(model.engine("cpu-w4g32"), model.checkpoint, OPTIONS).raise_if_wrong()


def swapped_experts(plan: Plan, section: Bytes) -> None:
    first, second = (panel(plan, section, "layers.2/moe_down.weight", 0, expert=expert) for expert in (0, 2))
    first[:], second[:] = second.copy(), first.copy()


def one_expert(plan: Plan, section: Bytes) -> None:
    """One of its scales, by one part in eight."""
    panel(plan, section, "layers.2/moe_down.weight", 18, expert=1)[:64].view(np.float32)[2] *= 1.125


def router_row(plan: Plan, section: Bytes) -> None:
    """Two experts' rows of the router exchanged."""
    (name,) = (name for name in step_named(plan, "layers.2/moe_router").inputs if name.endswith("weight"))
    rows = panel(plan, section, name, 0)[:64].view(np.float32)
    rows[[0, 1]] = rows[[1, 0]]


FAULTS: list[tuple[Edit, str, str]] = [
    (swapped_experts, "layers.2/moe_down", "expert [02], row"),
    (one_expert, "layers.2/moe_down", "expert 1, row 18"),
    (router_row, "layers.2/moe_router", "row [01],"),
]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kind", "fault"), spanning(itertools.product(["cpu-w4g32", "ref-w8"], FAULTS), *values(2)))
def test_a_fault_of_an_expert_is_named(kind: str, fault: tuple[Edit, str, str], chaotic: Built, tmp_path: Path) -> None:
    edit, step, where = fault
    engine = replant(chaotic.engine(kind), tmp_path / "engine", edit)
    with pytest.raises(EngineError, match=rf"first kernel call beyond its tolerance is {step}\n(.|\n)*{where}"):
        compare(engine, chaotic.checkpoint, OPTIONS).raise_if_wrong()


def other_expert(values: Array) -> Array:
    """The numbers of the experts that one token takes; shares, which are no whole numbers, stay."""
    if np.array_equal(values, np.round(values)):
        values[-1] = np.sort((values[-1] + 1) % 4)
    return values


@pytest.mark.slow
def test_the_wrong_expert_is_named_at_the_step_that_chooses_it(chaotic: Built) -> None:
    """By the kernel's reference, and by the source's graph in case that both choose by another rule."""
    findings = found_with(chaotic, "ref-w4g32", "layers.2/moe_route", other_expert)
    assert {finding.step for finding in findings} == {"layers.2/moe_route"}, "with these experts, the rest is right"
    assert [finding.what.split()[0] for finding in findings] == ["output", "output"]
    assert "of the source's graph" in findings[1].what


@pytest.mark.slow
def test_the_shares_of_experts_are_compared(chaotic: Built, tmp_path: Path) -> None:
    """As if a pass had lost that the shares are divided by their sum: kernel and reference agree on that."""
    engine = chaotic.engine("ref-bf16")
    with open_engine(engine) as opened:
        wrong = with_attr(opened.plan, "layers.2/moe_route", normalized=0)
        session = RefSession(wrong, opened.weights, SessionOptions(num_blocks=(8,)))
        object.__setattr__(opened, "plan", wrong)
        found = [finding.step for finding in run_on(session, engine, chaotic.checkpoint).findings]
    assert found[0].startswith("layers.2/")


SPOILED = [
    ("layers.0.mlp.gate_proj.weight", NAN, "cpu-w8"),
    ("layers.0.mlp.gate_proj.weight", -INF, "cpu-bf16"),
    ("layers.0.self_attn.v_proj.weight", NAN, "cpu-bf16-int8"),
    ("layers.0.self_attn.k_proj.weight", INF, "ref-w4g32"),
    ("embed_tokens.weight", NAN, "cpu-f32"),
    ("embed_tokens.weight", INF, "cpu-w8"),
    ("lm_head.weight", NAN, "ref-w8"),
    ("layers.1.post_attention_layernorm.weight", NAN, "cpu-f32"),
    ("layers.1.mlp.down_proj.weight", INF, "cpu-w8"),
    ("layers.1.mlp.down_proj.weight", -INF, "ref-f32"),
]


@pytest.mark.daily(1)
@pytest.mark.parametrize(("name", "value", "kind"), SPOILED)
def test_a_sound_engine_of_weights_that_are_no_numbers(name: str, value: float, kind: str, tmp_path: Path) -> None:
    model = changed(tmp_path, find_family("llama").tiny, spoiled={name: value})
    comparison = compare(model.engine(kind), model.checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    assert comparison.logits.left_out > 0
    assert comparison.logits.positions == 40 - comparison.logits.left_out
    assert any("NaN or infinities" in line for line in comparison.lines())
    for step in comparison.steps:
        assert np.isfinite([step.weight_error, step.kernel_error or 0, step.model_error or 0]).all()


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["experts.1.w2.weight", "gate.weight"])
@pytest.mark.parametrize("kind", ["cpu-f32", "ref-w8"])
def test_experts_that_a_token_does_not_take_do_not_spoil_it(name: str, kind: str, tmp_path: Path) -> None:
    model = changed(tmp_path, find_family("mixtral").tiny, spoiled={f"layers.1.block_sparse_moe.{name}": NAN})
    comparison = compare(model.engine(kind), model.checkpoint, OPTIONS)
    comparison.raise_if_wrong()
    assert (comparison.logits.positions > 0) == name.startswith("experts")


@pytest.mark.daily(2)
@pytest.mark.parametrize(("step", "value"), spanning(itertools.product(STEPS, [NAN, INF, -INF]), *values(2)))
def test_a_kernel_that_makes_nan_is_named(step: str, value: float, llama: Built) -> None:
    def spoil(values: Array) -> Array:
        values[-1, 3] = value
        return values

    findings = found_with(llama, "ref-f32", step, spoil)
    assert findings[0].step == step
    assert "output of kernel" in findings[0].what
    assert "column 3" in findings[0].what
    assert findings[0].got == str(value)


def test_a_kernel_that_loses_nan_is_named(tmp_path: Path) -> None:
    model = changed(tmp_path, find_family("llama").tiny, spoiled={"layers.0.self_attn.o_proj.weight": NAN})
    findings = found_with(model, "ref-f32", "layers.0/attention_out", np.nan_to_num)
    assert [finding.step for finding in findings] == ["layers.0/attention_out"] * 2
    assert "at other places" in findings[1].got


@pytest.mark.slow
def test_a_weight_that_is_nan_must_be_nan(llama: Built, tmp_path: Path) -> None:
    model = changed(tmp_path, find_family("llama").tiny, spoiled={"layers.0.self_attn.o_proj.weight": NAN})
    with pytest.raises(EngineError, match=r"layers.0/attention_out\n(.|\n)*expected: nan"):
        compare(llama.engine("ref-f32"), model.checkpoint, OPTIONS).raise_if_wrong()
    with pytest.raises(EngineError, match=r"layers.0/attention_out\n(.|\n)*got: nan"):
        compare(model.engine("ref-w8"), llama.checkpoint, OPTIONS).raise_if_wrong()


def test_relative_errors_by_hand() -> None:
    wanted = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert relative(wanted + np.array([[0.3, -0.4], [0, 0]]), wanted) == pytest.approx(0.1)
    holed, other = wanted.copy(), wanted.copy()
    holed[0, 0], other[1, 1] = NAN, INF
    assert relative(holed, np.where(np.isnan(holed), INF, wanted * 1.25)) == pytest.approx(0.2)
    assert relative(holed, wanted) == relative(wanted, other) == relative(holed, other) == INF
    assert relative(holed, other, where_both=True) == 0
    assert relative(holed, np.where([[False, True], [False, False]], NAN, wanted), together=2) == 0
    assert relative(np.full((1, 1), INF), np.full((1, 1), 1e39)) == 0, "infinite in float32"
    assert relative(wanted * 0, wanted * 0) == 0
    assert relative(wanted, wanted * 0) == 1


@pytest.mark.slow
@pytest.mark.native
def test_calls_that_give_other_bits_than_the_steps_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one logit."""
    run = TappedRun.logits

    def logits(self: TappedRun) -> Array:
        found = run(self)
        found.view(np.uint32)[7, 3] ^= 1
        return found

    llama = built(tmp_path, LLAMA)
    monkeypatch.setattr(TappedRun, "logits", logits)
    comparison = compare(llama.engine("cpu-bf16"), llama.checkpoint, OPTIONS)
    assert [(each.step, each.what) for each in comparison.findings] == [
        ("lm_head", "logits of the plan's variants, token 7")
    ]
    compare(llama.engine("ref-f32"), llama.checkpoint, OPTIONS).raise_if_wrong()  # which has no variants
