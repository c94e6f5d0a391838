"""Screened products of lm_head: the tokens of the full product, whatever the weights, the rows and the threads are."""

import dataclasses

import numpy as np
import pytest

from ingot.errors import EngineError
from ingot.plan import Step
from ingot.plugins.cpu.native import kernel_table
from ingot.plugins.cpu.session import open_native
from ingot.plugins.op import Array
from ingot.plugins.ops.screen import decide, dither, half_codes
from ingot.plugins.quantised import QuantisedRows
from ingot.plugins.target import SessionOptions
from ingot.plugins.weight_values import product
from ingot.step_io import NO_LOG_PROB, Ending, SequenceRules
from ingot.step_work import SCREEN_ROWS
from tests.plugins.cpu.one_step import hold
from tests.plugins.cpu.screened import open_screened, screened_plan, step_of
from tests.plugins.ops.screens import CASES, head_of, rows_of

pytestmark = pytest.mark.native

ISAS = sorted(name.rsplit(".", 1)[1] for name in kernel_table() if name.startswith("screen.w8."))


def expected(x: Array, head: QuantisedRows) -> tuple[list[int], list[int]]:
    ids, counts = decide(x, product(x, half_codes(head), "int8"), head.scale, dither(x.shape[1]), head)
    return ids.astype(int).tolist(), counts.astype(int).tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_full_product(isa: str, case: str) -> None:
    for index, k in enumerate((1, 17, 64, 300)):
        x, head = CASES[case](k)
        rows = len(x)
        session = open_screened(isa, x, head, threads=(1, 2, 5)[index % 3], pieces=1 + index % 2)
        full = session.run(step_of(rows, want_logits=True))
        assert full.logits is not None
        assert session.native.screen_counts == (0, 0, 0, 0)
        screened = session.run(step_of(rows))
        assert screened.ids.tolist() == full.ids.tolist() == [full.logits.argmax(axis=1).tolist()]
        assert (screened.log_probs == NO_LOG_PROB).all()
        ids, counts = expected(x, head)
        undecided = -1 in ids
        assert session.native.screen_counts == (1, undecided, 0 if undecided else rows, 0 if undecided else sum(counts))
        session.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [8, 15, 16, 17, 40, 257])
def test_small_vocabularies_and_many_threads(isa: str, vocab: int) -> None:
    x, head = rows_of(3, 65), head_of(vocab, 65)
    head.scale[vocab // 2] *= np.float32(50)  # far ahead, or far behind
    session = open_screened(isa, x, head, threads=5)
    assert session.run(step_of(3)).ids[0].tolist() == product(x, head, "int8").argmax(axis=1).tolist()
    assert session.native.screen_counts[0] == 1
    session.close()


@pytest.mark.parametrize("isa", ISAS)
def test_long_rows(isa: str) -> None:
    x, head = rows_of(2, 20000), head_of(300, 20000)
    session = open_screened(isa, x, head, threads=2)
    assert session.run(step_of(2)).ids[0].tolist() == product(x, head, "int8").argmax(axis=1).tolist()
    assert session.native.screen_counts[:2] == (1, 0)
    session.close()


def test_logits_that_are_no_numbers_are_told_as_ever() -> None:
    x, head = rows_of(2, 64), head_of(1000, 64)
    x[1, 3] = np.nan
    session = open_screened("avx2", x, head, threads=2)
    found = session.run(step_of(2))
    assert np.isnan(found.log_probs).tolist() == [[False, True]]
    assert found.log_probs[0, 0] == NO_LOG_PROB
    assert found.ends.tolist() == [Ending.NONE, Ending.FAILED]
    assert session.native.screen_counts == (1, 1, 0, 0)
    session.close()


def test_sequences_that_want_more_get_the_full_product() -> None:
    x, head = rows_of(SCREEN_ROWS + 1, 64), head_of(1000, 64)
    session = open_screened("avx2", x, head)
    usual = SequenceRules(log_prob=False)
    hold(session, 1, SequenceRules())
    alone = session.run(step_of(1))
    assert alone.log_probs[0, 0] < 0
    assert session.run(step_of(2)).log_probs.tolist() == [[alone.log_probs[0, 0], NO_LOG_PROB]]
    for more in ({"temperature": 0.5}, {"top": 0}, {"logit_bias": ((3, 1.0),)}, {"repetition_penalty": 1.1}):
        hold(session, 1, dataclasses.replace(usual, **more))
        assert session.run(step_of(1)).log_probs[0, 0] == NO_LOG_PROB
    hold(session, 1, usual)
    tapped, outputs = session.run_tapped(step_of(1), ["full"])
    assert tapped.ids[0].tolist() == outputs["full"]["logits"].argmax(axis=1).tolist() == alone.ids[0].tolist()
    session.run(step_of(SCREEN_ROWS + 1))
    assert session.native.screen_counts[0] == 0
    session.run(step_of(SCREEN_ROWS))
    assert session.native.screen_counts[:3] == (1, 0, SCREEN_ROWS)
    session.close()


def test_a_plan_whose_screen_does_not_fit_is_refused() -> None:
    x, head = rows_of(1, 64), head_of(100, 64)
    plan, section = screened_plan("avx2", x, head)
    product_step, choice = plan.screen

    def reading(*inputs: str) -> tuple[Step, Step]:
        return product_step, dataclasses.replace(choice, inputs=inputs)

    wrong = {
        "two steps": plan.screen[:1],
        "takes the place": (choice, product_step),
        "its own codes": reading("x", "logits", "other", "dither", "table"),
        "5 inputs": reading("x", "logits", "codes", "dither"),
        "weight full must hold a row of w4 codes": reading("x", "logits", "full", "dither", "table"),
        "weight codes must be w8": reading("x", "logits", "codes", "dither", "codes"),
        "there is no weight ": reading("x", "logits", "codes", "", "table"),
        "weight codes must hold": reading("logits", "logits", "codes", "dither", "table"),
        "must have 100 columns": reading("x", "x", "codes", "dither", "table"),
    }
    again = dataclasses.replace(next(each for each in plan.weights if each.name == "codes"), name="other")
    for word, screen in wrong.items():
        broken = dataclasses.replace(plan, screen=screen, weights=(*plan.weights, again))
        with pytest.raises(EngineError) as refused:
            open_native(broken, section, SessionOptions(num_blocks=(1,), threads=1), "avx2")
        assert word in str(refused.value)
    alone = dataclasses.replace(plan, steps=(plan.screen[1], *plan.steps), screen=())
    with pytest.raises(EngineError, match="no step of its own"):
        open_native(alone, section, SessionOptions(num_blocks=(1,), threads=1), "avx2")
