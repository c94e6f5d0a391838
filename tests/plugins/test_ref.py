"""The target ref: a plan made for another target, with every packed layout, gives the model's numbers."""

import numpy as np
import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.plan import Weight, WeightSlice
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.registry import find_target, op_names
from ingot.plugins.target import SessionOptions
from ingot.step_io import StepBatch
from tests.runtime.tiny_plan import VOCAB, TinyModel, make_model


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return make_model()


def batch_of(tokens: list[int], blocks: list[int], wanted: list[int]) -> StepBatch:
    return StepBatch(
        ids=np.array(tokens, np.int32),
        query_starts=np.array([0, len(tokens)], np.int32),
        past_lengths=np.array([0], np.int32),
        block_tables=np.array([[blocks]], np.int32),
        logit_rows=np.array(wanted, np.int32),
        slots=np.full(1, -1, np.int32),
        draws=np.empty(0, np.int32),
        want_logits=True,
    )


def test_every_op_has_a_ref_kernel() -> None:
    kernels = find_target("ref").kernels()
    assert {kernel.split(".")[0] for kernel in kernels} == set(op_names())
    assert "matmul.bf16.ref" in kernels
    assert find_target("ref").run_blocker("avx2") is None


def test_weights_come_back(model: TinyModel) -> None:
    layouts = set()
    for weight in model.plan.weights:
        np.testing.assert_array_equal(read_weight(model.weights, weight), model.logical[weight.name])
        layouts.add(weight.layout)
    assert layouts == {"row", "panel16.f32", "panel16.bf16", "panel16.f32.gated", "panel16.bf16.gated"}


def test_unknown_layout_is_refused() -> None:
    weight = Weight(
        name="w",
        dtype=DType.F32,
        shape=(2, 2),
        layout="panel7.f32",
        nbytes=16,
        pieces=(WeightSlice(begin=0, end=1, offset=0),),
    )
    with pytest.raises(EngineError, match="panel7"):
        read_weight(np.zeros(16, np.uint8), weight)


def test_logits_match_the_formulae(model: TinyModel) -> None:
    session = find_target("ref").open_session(
        model.plan, model.weights, SessionOptions(num_blocks=model.plan.in_each(9))
    )
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 50]
    result = session.run(batch_of(tokens, [7, 2, 5], list(range(len(tokens)))))
    assert result.logits is not None
    expected = model.logits(tokens)
    assert result.logits.shape == expected.shape == (9, VOCAB)
    assert np.abs(result.logits - expected).max() < 1e-4 * np.ptp(expected)
    session.close()
