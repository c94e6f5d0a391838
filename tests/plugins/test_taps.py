"""A session shows its inside, and does the same whether anybody looks or not, on every target that runs here."""

import numpy as np
import pytest

from ingot.plan import CacheGroup
from ingot.plugins.registry import find_target, targets
from ingot.plugins.target import CompilesGraph, SessionOptions
from ingot.step_io import StepBatch, TapSession
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model

TOKENS, BLOCKS = 21, 4
SHOWING = [target.name for target in targets() if not isinstance(target, CompilesGraph)]  # TensorRT shows no insides


def _batch() -> StepBatch:
    return StepBatch(
        ids=np.arange(TOKENS, dtype=np.int32) * 7 % VOCAB,
        query_starts=np.array([0, TOKENS], np.int32),
        past_lengths=np.zeros(1, np.int32),
        block_tables=np.array([[[3, 1]]], np.int32),
        logit_rows=np.arange(2, TOKENS, dtype=np.int32),
        slots=np.full(1, -1, np.int32),
        draws=np.empty(0, np.int32),
        want_logits=True,
    )


def _session(name: str, model: TinyModel) -> TapSession:
    target = find_target(name)
    if (reason := target.run_blocker()) is not None:
        pytest.skip(f"this machine lacks {name.removeprefix('cpu/')}: {reason}")
    session = target.open_session(
        model.plan, model.weights, SessionOptions(num_blocks=model.plan.in_each(BLOCKS), threads=2)
    )
    assert isinstance(session, TapSession)
    return session


@pytest.mark.parametrize("name", SHOWING)
def test_taps_show_what_ref_shows_and_change_nothing(name: str) -> None:
    model = make_model(find_target(name))
    names = [step.name for step in model.plan.steps]
    session, ref = _session(name, model), _session("ref", model)
    plain = session.run(_batch()).logits
    result, tapped = session.run_tapped(_batch(), names)
    _, expected = ref.run_tapped(_batch(), names)
    assert plain is not None
    assert result.logits is not None
    assert np.array_equal(plain, result.logits)
    assert list(tapped) == names == list(expected)
    for step in model.plan.steps:
        assert set(tapped[step.name]) == {output for output in step.outputs if output}
        for output, values in tapped[step.name].items():
            wanted = expected[step.name][output]
            assert values.shape == wanted.shape
            assert np.abs(values - wanted).max() < 0.02 * np.abs(wanted).max()
    assert np.array_equal(tapped[names[-1]]["logits"], plain)
    assert session.run_tapped(_batch(), names[3:4])[1].keys() == {names[3]}


@pytest.mark.parametrize("name", SHOWING)
def test_keys_and_values_are_those_of_ref(name: str) -> None:
    model = make_model(find_target(name))
    session, ref = _session(name, model), _session("ref", model)
    layout: CacheGroup = model.plan.caches[0]
    for each in (session, ref):
        each.run(_batch())
    for layer in layout.layers:
        for block, used in ((3, layout.tokens_per_block), (1, TOKENS - layout.tokens_per_block)):
            for got, wanted in zip(session.read_kv(layer, block), ref.read_kv(layer, block), strict=True):
                assert got.shape == (layout.kv_heads, layout.tokens_per_block, layout.head_dim)
                assert np.isfinite(wanted[:, :used]).all()
                assert np.abs(got[:, :used] - wanted[:, :used]).max() < 0.02 * np.abs(wanted[:, :used]).max()
