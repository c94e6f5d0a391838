"""Draws on the emulated GPU: those of the specification, with every rule."""

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ingot.dtypes import DType
from ingot.errors import RequestError
from ingot.plugins.cuda import draw_rows, sampling
from ingot.plugins.cuda.draw_rows import DrawLayout
from ingot.plugins.cuda.gpu import Device
from ingot.plugins.cuda.session import CudaSession
from ingot.plugins.ops.sample import edited
from ingot.plugins.sequences import Sequences, step_result
from ingot.step_io import Ending, Float32, KnownTokens, SequenceRules, StepResult, UInt32
from tests.plugins.cpu.one_step import one_step_plan
from tests.plugins.cuda import one_step
from tests.plugins.cuda.one_step import layout_of, open_gpu
from tests.plugins.ops.draws import Drawing, drawing_batch, expected_draws, rows_of, start_all
from tests.plugins.test_guided_sequences import Toy


def test_greedy_draws_are_those_of_the_specification(gpu: ctypes.CDLL) -> None:
    """Ties, infinite values, NaN; rows that are drawn from twice, and one that nobody draws from."""
    random = np.random.default_rng(3)
    logits = random.standard_normal((7, 777)).astype(np.float32) * 4
    logits[0, [300, 30, 700]] = 50
    logits[1, 5:] = -np.inf
    logits[2, 400] = np.nan
    logits[3] = -np.inf
    logits[4, 776] = np.inf
    logits[5] = 1
    found, expected = _draw(gpu, logits, [Drawing(row=row) for row in (0, 1, 2, 3, 4, 5, 5)])
    finite = [0, 1, 5, 6]
    assert found.ids[0, finite].tolist() == expected.ids[0, finite].tolist() == [30, int(logits[1].argmax()), 0, 0]
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    assert np.isnan(found.log_probs[0, [2, 3, 4]]).all()


@pytest.mark.daily(1)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.7), (0, 1e-6), (40, 0.9), (3, 0.999)])
def test_random_draws_are_those_of_the_specification(gpu: ctypes.CDLL, top_k: int, top_p: float) -> None:
    """Rows with many equal logits among them, so that heads end within ties."""
    random = np.random.default_rng(top_k)
    logits = random.standard_normal((6, 1300)).astype(np.float32) * 3
    logits[3:] = np.round(logits[3:])
    logits[5, 100:] = -np.inf
    given = [
        Drawing(
            row=place // 8,
            rules=SequenceRules(
                temperature=float(random.uniform(0.3, 2)), top_k=top_k, top_p=top_p, seed=int(random.integers(0, 2**63))
            ),
            generated=[0] * place,
        )
        for place in range(48)
    ]
    found, expected = _draw(gpu, logits, given)
    assert found.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    assert top_k == 1 or top_p < 0.1 or len(set(found.ids[0].tolist())) > 6


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("spread", "step", "top_k", "top_p"),
    [
        (3.0, 0.0, 0, 0.9),  # the head ends in a bin of few tokens
        (3.0, 0.0, 700, 0.95),  # more than threads could list
        (0.05, 0.0, 0, 0.6),  # in a bin of too many
        (0.05, 0.0, 2000, 0.9),
        (3.0, 1.0, 0, 0.97),  # among hundreds of equal ones
        (3.0, 1.0, 2500, 0.9),
        (0.0, 0.0, 900, 1.0),  # all are equal
        (0.0, 0.0, 0, 0.31),
    ],
)
def test_long_heads_are_those_of_the_specification(
    gpu: ctypes.CDLL, spread: float, step: float, top_k: int, top_p: float
) -> None:
    """Of a vocabulary whose rows begin where no load of 16 bytes can; -inf among them."""
    random = np.random.default_rng(top_k)
    logits = (random.standard_normal((2, 6001)) * spread).astype(np.float32)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    logits[1, ::3] = -np.inf
    given = [
        Drawing(row=row, rules=SequenceRules(temperature=1.3, top_k=top_k, top_p=top_p, seed=seed, top=9))
        for row in range(2)
        for seed in range(4)
    ]
    found, expected = _draw(gpu, logits, given)
    for name in ("ids", "token_ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.daily(1)
@pytest.mark.parametrize("vocab", [2, 33, 1300])
def test_every_rule_is_applied_on_the_device(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    """More draws with rules than lines of scratch, and lists that take several rounds."""
    random = np.random.default_rng(vocab)
    logits = (random.standard_normal((5, vocab)) * 3).astype(np.float32)
    logits[3:] = np.round(logits[3:])
    given = [_drawing(random, vocab) for _ in range(40)]
    layout_of_draws = DrawLayout.of
    monkeypatch.setattr(
        DrawLayout, "of", lambda plan: dataclasses.replace(layout_of_draws(plan), draws=29, lines=8, tops=2 * 3 * vocab)
    )
    found, expected = _draw(gpu, logits, given)
    assert (expected.ids < 0).sum() < 20
    for name in ("ids", "token_ranks", "top_ids", "ends"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    for name in ("log_probs", "top_log_probs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=2e-5)


def _drawing(random: np.random.Generator, vocab: int) -> Drawing:
    biases = tuple((int(t), float(random.choice([-np.inf, -2.0, 0.3, 3.0]))) for t in random.integers(0, vocab, 4))
    history = random.integers(0, vocab, 30).tolist()
    split = int(random.integers(1, 31))
    wanted = int(random.choice([-1, 0, 1, min(5, vocab), vocab]))
    rules = SequenceRules(
        temperature=float(random.choice([0.0, 0.4, 1.0, 2.5])),
        top_k=int(random.choice([0, 1, 3, 40])),
        top_p=float(random.choice([1.0, 0.95, 0.5])),
        min_p=float(random.choice([0, 0.05, 0.4, 1])),
        seed=int(random.integers(0, 2**63)),
        repetition_penalty=float(random.choice([0.5, 1.0, 1.3])),
        frequency_penalty=float(random.choice([0, random.normal()])),
        presence_penalty=float(random.choice([0, random.normal()])),
        logit_bias=() if random.random() < 0.3 else biases[:vocab],
        bad_words=() if random.random() < 0.5 else tuple((token,) for token in random.integers(0, vocab, 3).tolist()),
        top=None if wanted < 0 else wanted,
        grammar=Allowing(vocab, random) if random.random() < 0.3 else None,
    )
    return Drawing(row=int(random.integers(5)), rules=rules, prompt=history[:split], generated=history[split:])


class Allowing:
    """A grammar that allows about half of the tokens, and knows one word less than the vocabulary, or one more."""

    native = (0, 0, 0, 0, 0, 0, 0)

    def __init__(self, vocab: int, random: np.random.Generator) -> None:
        words = (vocab + 31) // 32 + int(random.choice([-1, 0, 1]))
        self._mask = random.integers(0, 2**32, max(words, 1), np.uint32)

    def reset(self) -> bool:
        return True

    def allowed(self) -> UInt32:
        return self._mask

    def consume(self, token: int) -> bool:
        return False

    def rollback(self, count: int) -> bool:
        return True


def test_rules_change_logits_to_the_bit(gpu: ctypes.CDLL) -> None:
    random = np.random.default_rng(5)
    logits = (random.standard_normal((5, 301)) * 3).astype(np.float32)
    rules = SequenceRules(repetition_penalty=1.3, frequency_penalty=0.37, presence_penalty=-0.21)
    given = [
        dataclasses.replace(_drawing(random, 301), rules=dataclasses.replace(rules, grammar=Allowing(301, random)))
        for _ in range(6)
    ]
    sequences, rows = Sequences(), rows_of(logits, given)
    start_all(sequences, given)
    expected = [edited(row, draw) for row, draw in zip(rows, sequences.draws(drawing_batch(len(given))), strict=True)]
    session = _session_of(rows, given)
    start_all(session, given)
    session.run(drawing_batch(len(given)))
    found = np.empty_like(rows)
    session.device.fetch(found, session._sampler.lines_at)
    session.close()
    np.testing.assert_array_equal(found, expected)


def test_histories_grow_on_the_device(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step after step, also where the host draws once; logits do not leave the device."""
    random = np.random.default_rng(9)
    logits = (random.standard_normal((3, 40)) * 2).astype(np.float32)
    rules = SequenceRules(repetition_penalty=1.5, frequency_penalty=0.9, presence_penalty=0.4, temperature=0.5)
    given = [Drawing(row=row, rules=rules, prompt=[1, 2, 2], generated=[5] * row) for row in range(3)]
    sequences, rows, batch = Sequences(), rows_of(logits, given), drawing_batch(3)
    session, fetch, bytes_fetched = _session_of(rows, given), Device.fetch, list[int]()

    def counted(self: Device, data: npt.NDArray[np.generic], source: int) -> None:
        bytes_fetched.append(data.nbytes)
        fetch(self, data, source)

    monkeypatch.setattr(Device, "fetch", counted)
    for each in (sequences, session):
        start_all(each, given)
    slots = np.arange(3, dtype=np.int32)
    for step in range(12):
        expected = sequences.draw(slots, rows, rows)
        found = session.draw(slots, rows, rows) if step == 6 else session.run(batch)
        assert found.ids.tolist() == expected.ids.tolist()
    session.close()
    assert max(bytes_fetched) < logits[0].nbytes


def test_masks_follow_a_grammar_on_the_device(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host tells what may come next, step by step; logits do not leave the device."""
    places = ([4, 39], [5], [1, 2, 33], [7, 8])
    logits = (np.random.default_rng(3).standard_normal((3, 40)) * 2).astype(np.float32)

    def drawings() -> list[Drawing]:
        """Each with a grammar of its own, and with rules that prefer what it forbids."""
        rules = SequenceRules(logit_bias=((0, 99.0),))
        return [
            Drawing(row=n, rules=dataclasses.replace(rules, grammar=Toy(*places, words=2), temperature=0.7 * n, seed=n))
            for n in range(3)
        ]

    given, sequences, fetch, bytes_fetched = drawings(), Sequences(), Device.fetch, list[int]()
    rows, batch, slots = rows_of(logits, given), drawing_batch(3), np.arange(3, dtype=np.int32)
    session = _session_of(rows, given)

    def counted(self: Device, data: npt.NDArray[np.generic], source: int) -> None:
        bytes_fetched.append(data.nbytes)
        fetch(self, data, source)

    monkeypatch.setattr(Device, "fetch", counted)
    start_all(sequences, drawings())
    start_all(session, given)
    for place in places:
        found, expected = session.run(batch), sequences.draw(slots, rows, rows)
        assert found.ids.tolist() == expected.ids.tolist()
        assert {*found.ids.ravel().tolist()} <= {*place}
        assert found.ends.tolist() == expected.ends.tolist()
    session.close()
    assert found.ends.tolist() == [Ending.STOP] * 3
    assert max(bytes_fetched) < logits[0].nbytes


def test_longer_lists_than_the_device_makes(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draw_rows, sampling):
        monkeypatch.setattr(module, "MOST_LIKELY", 6)
    logits = np.random.default_rng(4).standard_normal((3, 50)).astype(np.float32)
    found, expected = _draw(gpu, logits, [Drawing(row=row, rules=SequenceRules(top=4 + 2 * row)) for row in range(3)])
    assert found.token_ranks is not None
    assert found.token_ranks.tolist() == [[1, 1, 1]]
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top_log_probs, expected.top_log_probs, atol=1e-5)  # type: ignore[arg-type]


def test_known_tokens(gpu: ctypes.CDLL) -> None:
    logits = np.random.default_rng(4).standard_normal((3, 50)).astype(np.float32)
    batch, given = drawing_batch(3), [Drawing(row=row) for row in range(3)]
    known = KnownTokens(
        row=np.array([0, 2], np.int32), token=np.array([49, 7], np.int32), top=np.array([0, 3], np.int32)
    )
    batch = dataclasses.replace(batch, draws=batch.draws[1:], known=known)
    session, sequences = _session_of(logits, given), Sequences()
    for each in (sequences, session):
        start_all(each, given)
    found, expected = session.run(batch), step_result(sequences, batch, logits)
    for wrong in (
        dataclasses.replace(known, token=np.array([0, 50], np.int32)),
        dataclasses.replace(known, top=known.token + 2),
    ):
        with pytest.raises(RequestError, match="a token whose probability is asked for"):
            session.run(dataclasses.replace(batch, known=wrong))
    session.close()
    for name in ("ids", "token_ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (Drawing(row=0, rules=SequenceRules(logit_bias=((50, 1.0),))), "a token is 50, expected 0 to 49"),
        (Drawing(row=0, rules=SequenceRules(bad_words=((3, -1),))), "a token is -1"),
        (Drawing(row=0, rules=SequenceRules(bad_words=((),))), "a bad word has no token"),
        (Drawing(row=0, rules=SequenceRules(end_ids=(99,), min_tokens=2)), "a token is 99"),
        (Drawing(row=0, prompt=[77]), "a token is 77"),
        (Drawing(row=0, rules=SequenceRules(top=51)), "of 50 tokens, 51 are wanted"),
        (Drawing(row=0, prompt=[1] * 99), "99 tokens, of which"),
    ],
)
def test_sequences_that_kernels_cannot_take_are_refused(gpu: ctypes.CDLL, given: Drawing, word: str) -> None:
    session = _session_of(np.zeros((1, 50), np.float32), [Drawing(row=0)])
    with pytest.raises(RequestError, match=word):
        start_all(session, [given])
    session.close()


def _session_of(logits: Float32, drawings: Sequence[Drawing]) -> CudaSession:
    """A step of it gives each drawing its row of these logits."""
    inputs, batch = [logits, np.zeros_like(logits)], drawing_batch(len(drawings))
    plan, section = one_step_plan("add.f32.sm80", inputs, {}, batch, layout_of(DType.BF16), gives_logits=True)
    plan = dataclasses.replace(plan, limits=dataclasses.replace(plan.limits, max_seq_len=64))
    session = open_gpu(plan, section, len(drawings))
    for index, values in enumerate(inputs):
        offset = next(buffer.offset for buffer in plan.buffers if buffer.name == f"in{index}")
        session.device.upload(session.addresses.arena + offset, values)
    return session


def _draw(driver: ctypes.CDLL, logits: Float32, drawings: Sequence[Drawing]) -> tuple[StepResult, StepResult]:
    """(on the GPU, by the specification); threads run in both orders."""
    batch, expected = drawing_batch(len(drawings)), expected_draws(logits, drawings)
    session, found = _session_of(rows_of(logits, drawings), drawings), list[StepResult]()
    for backwards in one_step.ORDERS:
        driver.emulated_run_backwards(backwards)
        start_all(session, drawings)
        found.append(session.run(batch))
    session.close()
    assert found[0].ids.tolist() == found[-1].ids.tolist()
    np.testing.assert_array_equal(found[0].log_probs, found[-1].log_probs)
    return found[0], expected
