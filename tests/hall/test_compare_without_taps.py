"""Engines whose sessions have no taps, as those of TensorRT: weights and logits are compared, the rest is said not
to be."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ingot.compare.compare import CompareOptions, compare
from ingot.convert.family import find_family
from ingot.errors import EngineError
from ingot.plan import Plan
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.step_io import Ahead, StepBatch, StepResult
from tests.e2e.command import ingot
from tests.hall.planted import Edit, replant
from tests.hall.test_compare import LLAMA, OPTIONS, PLANTED, Built, built
from tests.runtime.wrapped_session import WrappedSession

LAYERS = "not compared: ref has no taps"


class PlainSession(WrappedSession):
    """What a session must have, and nothing else. The logits of `spoiled` tokens have an error of `size`."""

    size = 0.0
    spoiled = slice(0, 0)

    def run(self, batch: StepBatch, ahead: Ahead | None = None) -> StepResult:
        result = super().run(batch, ahead)
        if result.logits is None:
            return result
        logits = result.logits.copy()
        logits[self.spoiled] += self.size * np.random.default_rng(0).standard_normal(logits[self.spoiled].shape)
        return dataclasses.replace(result, logits=logits)


@pytest.fixture(autouse=True)
def no_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ref` opens plain sessions."""

    def open_session(self: object, plan: Plan, weights: npt.NDArray[np.uint8], options: SessionOptions) -> PlainSession:
        return PlainSession(RefSession(plan, weights, options))

    monkeypatch.setattr(type(find_target("ref")), "open_session", open_session)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return built(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "ref-f32"),
        ("llama", "ref-bf16"),
        ("llama", "ref-w4g32"),
        ("gpt2", "ref-bf16"),
        ("mixtral", "ref-bf16"),
        ("qwen3", "ref-bf16"),
        ("gemma3_text", "ref-f32"),
        ("gpt_neox", "ref-bf16"),
        ("phi3", "ref-f32-int8"),
    ],
)
def test_a_sound_engine(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared has the figures that it has with taps; roundings add up, and so does what they explain."""
    model = built(tmp_path, find_family(family).tiny)
    plain = compare(model.engine(kind), model.checkpoint, OPTIONS)
    plain.raise_if_wrong()
    monkeypatch.undo()
    tapped = compare(model.engine(kind), model.checkpoint, OPTIONS)
    assert (plain.layers, tapped.layers) == (LAYERS, "compared")
    assert plain.logits == tapped.logits
    assert [step.weight_error for step in plain.steps] == [step.weight_error for step in tapped.steps]
    assert {step.kernel_error for step in plain.steps} == {None}
    assert [step.name for step in plain.steps if step.model_error is not None] == ["lm_head"]
    ours, theirs = plain.steps[-1], tapped.steps[-1]
    assert ours.model_error is not None
    assert theirs.model_error is not None
    assert theirs.model_error <= ours.model_error < ours.model_bound
    assert theirs.model_bound < ours.model_bound
    assert ours.model_bound < max(40 * ours.model_error, 3e-5), "a bound that any error fits into is none"


@pytest.mark.daily(2)
@pytest.mark.parametrize(("edit", "step", "where"), PLANTED, ids=[edit.__name__ for edit, _, _ in PLANTED])
def test_an_error_in_the_packed_bytes_is_named(edit: Edit, step: str, where: str, llama: Built, tmp_path: Path) -> None:
    engine = replant(llama.engine("ref-bf16"), tmp_path / "engine", edit)
    with pytest.raises(EngineError, match=rf"first kernel call beyond its tolerance is {step}\n(.|\n)*{where}"):
        compare(engine, llama.checkpoint, OPTIONS).raise_if_wrong()


@pytest.mark.daily(1)
@pytest.mark.parametrize("spoiled", [slice(None), slice(-1, None)])
def test_wrong_logits_are_found(spoiled: slice, llama: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them a little, or those of the last token of each chunk: 23, 38 and 39 of 40."""
    engine = llama.engine("ref-f32")
    compare(engine, llama.checkpoint, OPTIONS).raise_if_wrong()
    monkeypatch.setattr(PlainSession, "spoiled", spoiled)
    monkeypatch.setattr(PlainSession, "size", 0.01)
    comparison = compare(engine, llama.checkpoint, OPTIONS)
    with pytest.raises(EngineError) as caught:
        comparison.raise_if_wrong()
    assert f"its logits are beyond their tolerance (layers {LAYERS})" in str(caught.value)
    token = re.search(r"farthest off at token (\d+)", str(caught.value))
    assert token is not None
    assert spoiled.start is None or int(token[1]) in (23, 38, 39)
    assert len(comparison.findings) == 1


def test_logits_that_are_no_numbers_are_found(llama: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainSession, "spoiled", slice(0, 1))
    monkeypatch.setattr(PlainSession, "size", np.nan)
    with pytest.raises(
        EngineError, match=r"logits are beyond their tolerance(.|\n)*token (0|24|39)\b(.|\n)*at other places"
    ):
        compare(llama.engine("ref-bf16"), llama.checkpoint, OPTIONS).raise_if_wrong()


def test_groups_change_nothing(llama: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 8 tokens, one at a time."""
    options = CompareOptions(tokens=24)
    monkeypatch.setattr("ingot.compare.compare.GROUP_BYTES", 8 * 8 * 61)
    plain = compare(llama.engine("ref-bf16"), llama.checkpoint, options)
    plain.raise_if_wrong()
    assert plain.logits.positions == 24


def test_the_command_says_what_was_not_compared(llama: Built, tmp_path: Path) -> None:
    engine = replant(llama.engine("ref-bf16"), tmp_path / "engine", lambda plan, section: None)
    said = ingot(
        "verify", engine, "--against", llama.checkpoint, "--tokens", 20, "--store_results", "--log_level", "verbose"
    ).succeeds()
    assert f"layers      {LAYERS}" in said.out
    assert re.search(r"logits      \d\.\d+% from the source, tolerance \d", said.out)
    assert "kernels" not in said.out
    assert "lm_head: weights" in said.err
    inspected = json.loads(ingot("inspect", engine, "--json").succeeds().out)["verification"]
    assert inspected["layers"] == LAYERS
    assert f"layers {LAYERS}" in " ".join(ingot("inspect", engine).succeeds().out.split())
    document = json.loads(
        ingot("verify", engine, "--against", llama.checkpoint, "--tokens", 20, "--json").succeeds().out
    )
    assert document["summary"]["layers"] == LAYERS
    assert document["steps"][0]["kernel_error"] is None
