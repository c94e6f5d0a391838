"""KL, agreement and perplexity of given logits; what a sequence is cut from; what a report says of them."""

from pathlib import Path

import numpy as np
import pytest

from ingot.compare.blas import _openblas, one_thread_per_product
from ingot.compare.logit_metrics import LogitMeter
from ingot.compare.report import Comparison, Finding, LogitMetrics, StepFigures
from ingot.compare.tokens import read_tokens
from ingot.errors import EngineError


def test_figures_by_hand() -> None:
    """Two positions of three tokens: probabilities 1/2, 1/4, 1/4 in the source, 1/4, 1/2, 1/4 and the same here."""
    source = np.log(np.array([[2.0, 1, 1], [2, 1, 1]])) + 5
    engine = np.log(np.array([[1.0, 2, 1], [2, 1, 1]])).astype(np.float32)
    meter = LogitMeter(is_text=True)
    meter.add(np.array([[0, 1]], np.int32), engine, source)
    figures = meter.metrics()
    kl = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert figures.positions == 2
    assert figures.kl_max == pytest.approx(kl, rel=1e-6)
    assert figures.kl_mean == pytest.approx(kl / 2, rel=1e-6)
    assert figures.top1_agreement == 0.5
    assert figures.perplexity == pytest.approx(2, rel=1e-6), "token 1 follows, which has probability 1/2"
    assert figures.source_perplexity == pytest.approx(4, rel=1e-6)


def test_the_divergence_is_of_the_engine_from_the_source() -> None:
    """Sum of p * log(p / q), p of the source: 0.9 and 0.1, q of the engine: 0.5 and 0.5."""
    meter = LogitMeter(is_text=False)
    meter.add(np.array([[0]], np.int32), np.zeros((1, 2), np.float32), np.log(np.array([[0.9, 0.1]])))
    kl = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert meter.metrics().kl_mean == pytest.approx(kl)
    assert kl != pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), rel=0.1), "the other way round"


def test_positions_without_numbers_are_left_out_of_every_figure() -> None:
    """Of the engine, of the source; a position that follows one of them foretells nothing of it."""
    source = np.log(np.array([[2.0, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2]]))
    engine = source.astype(np.float32)
    engine[0, 1], source[2, 0] = np.nan, np.inf
    meter = LogitMeter(is_text=True)
    meter.add(np.array([[0, 1, 2, 2]], np.int32), engine, source)
    figures = meter.metrics()
    assert (figures.positions, figures.left_out) == (2, 2)
    assert figures.kl_max == pytest.approx(0, abs=1e-6)
    assert figures.top1_agreement == 1
    assert figures.source_perplexity == pytest.approx(4), "of position 1 alone, which foretells token 2"
    nothing = LogitMeter(is_text=True)
    nothing.add(np.array([[0, 1]], np.int32), np.full((2, 3), np.nan, np.float32), np.zeros((2, 3)))
    assert (nothing.metrics().positions, nothing.metrics().kl_mean, nothing.metrics().perplexity) == (0, None, None)


def test_groups_add_up_and_the_end_of_a_sequence_foretells_nothing() -> None:
    generator = np.random.default_rng(0)
    sequences = generator.integers(0, 7, (3, 5)).astype(np.int32)
    logits = generator.normal(size=(15, 7))
    whole, parts = LogitMeter(is_text=True), LogitMeter(is_text=True)
    whole.add(sequences, logits + 0.1 * generator.normal(size=(15, 7)), logits)
    generator = np.random.default_rng(0)
    generator.integers(0, 7, (3, 5)), generator.normal(size=(15, 7))
    noisy = logits + 0.1 * generator.normal(size=(15, 7))
    for begin in range(3):
        rows = slice(5 * begin, 5 * begin + 5)
        parts.add(sequences[begin : begin + 1], noisy[rows], logits[rows])
    assert parts.metrics() == whole.metrics()
    foretold = [logits[5 * s + t] - np.log(np.exp(logits[5 * s + t]).sum()) for s in range(3) for t in range(4)]
    following = sequences[:, 1:].reshape(-1)
    expected = np.exp(-np.mean([row[token] for row, token in zip(foretold, following, strict=True)]))
    assert whole.metrics().source_perplexity == pytest.approx(expected)


def test_an_engine_without_a_tokenizer_gets_the_same_random_tokens_every_time(tmp_path: Path) -> None:
    first, again = (read_tokens(tmp_path, 100, 50, None, 12) for _ in range(2))
    assert first.sequences.shape == (4, 12), "what does not fill a sequence is left out"
    assert np.array_equal(first.sequences, again.sequences)
    assert not first.is_text
    assert len(np.unique(first.sequences)) > 20
    assert read_tokens(tmp_path, 100, 5, None, 12).sequences.shape == (1, 5)


def _comparison(*findings: Finding, notes: tuple[str, ...] = ()) -> Comparison:
    steps = tuple(
        StepFigures(
            name=f"layers.{index}/down",
            kernel="matmul.f32.ref",
            weight_error=0.1,
            kernel_error=ratio,
            model_error=0.2 * index,
            model_bound=0.5,
        )
        for index, ratio in enumerate((0.5, float("inf")))
    )
    logits = LogitMetrics(
        positions=3, left_out=0, kl_mean=0.5, kl_max=1.0, top1_agreement=1.0, perplexity=None, source_perplexity=None
    )
    return Comparison(
        engine=Path("engine"),
        target="ref",
        source=Path("source"),
        text="a text",
        steps=steps,
        findings=findings,
        logits=logits,
        notes=notes,
        layers="compared",
    )


def test_the_first_finding_is_the_error_and_the_rest_is_counted() -> None:
    finding = Finding(step="layers.0/down", what="weight w, row 3", expected="1", got="2")
    later = Finding(step="layers.1/down", what="output", expected="1", got="2")
    _comparison().raise_if_wrong()
    with pytest.raises(
        EngineError,
        match=r"is layers.0/down\n(.|\n)*row 3(.|\n)*got: 2; 1 later kernel call is beyond its tol(.|\n)*other files",
    ):
        _comparison(finding, finding, later, notes=("other files",)).raise_if_wrong()
    assert not _comparison(finding).document()["ok"]


def test_numbers_that_json_does_not_know_are_null() -> None:
    document = _comparison().document()
    assert [step["kernel_error"] for step in document["steps"]] == [0.5, None]
    assert document["summary"]["worst_step"] == "layers.1/down"
    assert "perplexity" not in "\n".join(_comparison().lines())


def test_products_take_one_thread_each_for_a_while() -> None:
    library = _openblas()
    if library is None:
        with one_thread_per_product():
            return
    library.scipy_openblas_set_num_threads64_(2)
    with one_thread_per_product():
        assert library.scipy_openblas_get_num_threads64_() == 1
    assert library.scipy_openblas_get_num_threads64_() == 2
