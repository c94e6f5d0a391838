"""What every target does: each one that this machine has, and GPUs as they are emulated.

A new target is tested by being there. What compiles the Graph (TensorRT) shows no insides and promises no bits: its
sessions are held to what remains, on an emulated library.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import Engine, open_engine
from ingot.errors import EngineError, RequestError
from ingot.plan import Plan
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target, targets
from ingot.plugins.target import CompilesGraph, SessionOptions
from ingot.step_io import Float32, Session, StepBatch, TapSession
from tests.handmade import TINY_LLAMA, write_model
from tests.plugins.cpu.one_step import batch_of
from tests.plugins.cuda.conftest import emulation as emulation
from tests.plugins.cuda.conftest import gpu as gpu
from tests.plugins.cuda.conftest import real_context as real_context
from tests.plugins.tensorrt.emulated_target import EmulatedLibrary
from tests.spanning import spanning

pytestmark = pytest.mark.native

STEPWISE = [target.name for target in targets() if not isinstance(target, CompilesGraph)]
COMPILED = [target.name for target in targets() if isinstance(target, CompilesGraph)]
# Of targets that run the steps of a plan. Emulated GPUs compute alike: one of them shows its insides.
INSIDE = [name for name in STEPWISE if name == "cuda/sm90" or not name.startswith("cuda/")]
OF_STEPS = pytest.mark.parametrize("name", INSIDE, indirect=True)
BLOCKS, TABLES = 8, [[3, 0, 5], [1, 4, 2]]
TOLERANCE = 2e-5  # of the range of what is compared


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conformance")
    write_model(folder / "model", {**TINY_LLAMA, "head_dim": 16})
    convert(ConvertOptions(model_dir=folder / "model", output_dir=folder / "checkpoint"))
    return folder / "checkpoint"


ALIKE = sorted([*STEPWISE, *COMPILED], key=lambda name: not name.endswith("/sm90"))  # the first of each kind, every day


@pytest.fixture(params=spanning(ALIKE, lambda name: name.partition("/sm")[0]))
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target that runs here."""
    found: str = request.param
    if find_target(found).on_gpu:
        monkeypatch.setenv("INGOT_EMULATED_SM", found.partition("/sm")[2] or "89")
        request.getfixturevalue("gpu")
        if found in COMPILED:
            request.getfixturevalue("library")
    if (reason := find_target(found).run_blocker()) is not None:
        pytest.skip(f"this machine lacks {found.removeprefix('cpu/')}: {reason}")
    return found


@pytest.fixture
def library(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> EmulatedLibrary:
    """In the place of TensorRT."""
    return EmulatedLibrary(gpu, monkeypatch)


@pytest.fixture(scope="module")
def networks() -> dict[str, onnx.ModelProto]:
    """What was compiled for a target."""
    return {}


@pytest.fixture
def engine(
    name: str, checkpoint: Path, networks: dict[str, onnx.ModelProto], request: pytest.FixtureRequest
) -> Iterator[Engine]:
    folder = checkpoint.with_name(name.replace("/", "-"))
    library: EmulatedLibrary | None = request.getfixturevalue("library") if name in COMPILED else None
    if not folder.is_dir():
        config = BuildConfig(
            target=name,
            precision="f32",
            autotune=False,
            max_seq_len=64,
            tokens_per_block=16,
            max_batch_size=4,
            max_num_tokens=48,
        )
        build(config, checkpoint, folder)
        if library is not None:
            networks[name] = library.networks[-1]
    if library is not None:
        library.load(folder, networks[name])
    with open_engine(folder) as opened:
        yield opened


Open = Callable[[Plan], Session]


@pytest.fixture
def opened(name: str, engine: Engine) -> Iterator[Open]:
    """Opens sessions of the target on plans of the engine's weights."""
    sessions: list[Session] = []

    def open_plan(plan: Plan) -> Session:
        options = SessionOptions(num_blocks=plan.in_each(BLOCKS), directory=engine.directory)
        session = find_target(name).open_session(plan, engine.weights, options)
        assert isinstance(session, TapSession) == (name in STEPWISE)
        sessions.append(session)
        return session

    yield open_plan
    for session in sessions:
        session.close()


def _ref(engine: Engine, plan: Plan | None = None) -> RefSession:
    plan = plan or engine.plan
    return RefSession(plan, engine.weights, SessionOptions(num_blocks=plan.in_each(BLOCKS)))


def _steps() -> list[StepBatch]:
    """Two prompts, one in two chunks; then tokens of both."""
    return [_batch(each, TABLES) for each in ([(0, 30), (0, 17)], [(30, 9), (17, 1)], [(39, 1), (18, 1)])]


def _batch(lengths: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> StepBatch:
    """Every row is wanted. The token at a position is the same in every sequence."""
    ids = np.concatenate([np.arange(past, past + new) * 7 % 61 for past, new in lengths]).astype(np.int32)
    return batch_of(lengths, tables, range(len(ids)), want_logits=True, ids=ids)


def _logits(session: Session, steps: Sequence[StepBatch]) -> list[Float32]:
    found = []
    for batch in steps:
        logits = session.run(batch).logits
        assert logits is not None
        found.append(logits)
    return found


def _close(found: Float32, wanted: Float32) -> bool:
    return found.shape == wanted.shape and bool(
        np.abs(found - wanted).max() <= TOLERANCE * max(float(np.ptp(wanted)), 1e-3)
    )


@pytest.mark.daily(1)
def test_logits_are_those_of_ref(engine: Engine, opened: Open) -> None:
    found, wanted = (_logits(session, _steps()) for session in (opened(engine.plan), _ref(engine)))
    assert all(map(_close, found, wanted))


@OF_STEPS
def test_a_sequence_has_the_same_bits_alone(engine: Engine, opened: Open) -> None:
    together = _logits(opened(engine.plan), _steps())
    session = opened(engine.plan)
    rows = _logits(session, [_batch([each], TABLES[1:]) for each in ((0, 17), (17, 1), (18, 1))])
    for alone, both in zip(rows, together, strict=True):
        np.testing.assert_array_equal(alone, both[-len(alone) :])


@OF_STEPS
def test_taps_show_what_ref_shows_and_change_nothing(engine: Engine, opened: Open) -> None:
    plan, batch = engine.plan, _steps()[0]
    names = [step.name for step in plan.steps]
    session = opened(plan)
    assert isinstance(session, TapSession)
    (plain,) = _logits(session, [batch])
    result, tapped = session.run_tapped(batch, names)
    _, expected = _ref(engine).run_tapped(batch, names)
    assert result.logits is not None
    np.testing.assert_array_equal(plain, result.logits)
    assert list(tapped) == names == list(expected)
    for step in plan.steps:
        assert set(tapped[step.name]) == {output for output in step.outputs if output}
        assert all(_close(values, expected[step.name][output]) for output, values in tapped[step.name].items())
    np.testing.assert_array_equal(tapped[names[-1]][plan.logits], plain)
    assert session.run_tapped(batch, names[3:4])[1].keys() == {names[3]}


@OF_STEPS
def test_keys_and_values_are_those_of_ref(engine: Engine, opened: Open) -> None:
    session, ref, (group,) = opened(engine.plan), _ref(engine), engine.plan.caches
    assert isinstance(session, TapSession)
    for each in (session, ref):
        each.run(_steps()[0])
    for layer in group.layers:
        for block, used in ((3, 16), (0, 14), (1, 16), (4, 1)):
            for got, wanted in zip(session.read_kv(layer, block), ref.read_kv(layer, block), strict=True):
                assert got.shape == (group.kv_heads, group.tokens_per_block, group.head_dim)
                assert _close(got[:, :used], wanted[:, :used])


@OF_STEPS
def test_layers_that_share_a_cache(engine: Engine, opened: Open) -> None:
    """The last layer's attention reads what the first layer has written."""
    plan = engine.plan
    steps = tuple(
        dataclasses.replace(step, attrs={**step.attrs, "layer": 0}) if step.op == "paged_attention" else step
        for step in plan.steps
    )
    shared = dataclasses.replace(plan, steps=steps, variants=())
    (found,), (wanted,), (apart,) = (
        _logits(each, _steps()[:1]) for each in (opened(shared), _ref(engine, shared), opened(plan))
    )
    assert _close(found, wanted)
    assert np.abs(found - apart).max() > 0.01 * np.ptp(wanted), "the two caches differ"


def test_a_step_without_wanted_rows(engine: Engine, opened: Open) -> None:
    """A chunk before a prompt's last one."""
    session = opened(engine.plan)
    result = session.run(batch_of([(0, 16)], [[2]], (), want_logits=True))
    assert result.ids.shape == (1, 0)
    assert result.logits is not None
    assert result.logits.shape == (0, engine.plan.vocab_size)


IDS = np.arange(4, dtype=np.int32)
WRONG = {
    "a token beyond the vocabulary": batch_of([(0, 4)], [[0]], ids=IDS + 1000),
    "a block beyond the pool": batch_of([(0, 4)], [[BLOCKS]], ids=IDS),
    "no block": batch_of([(0, 4)], [[-1]], ids=IDS),
    "a wanted row beyond the tokens": batch_of([(0, 4)], [[0]], [4], ids=IDS),
    "too few blocks": batch_of([(16, 4)], [[0]], ids=IDS),
    "too many positions": batch_of([(62, 4)], [[0, 1, 2, 3, 4]], ids=IDS),
    "a draw of another row": batch_of([(0, 4)], [[0]], [3], ids=IDS, draws=[1]),
    "a sequence without tokens": batch_of([(0, 4), (3, 0)], [[0], [1]], ids=IDS),
    "more tokens than the limit": batch_of([(0, 49)], [[0, 1, 2, 3]], ids=np.zeros(49, np.int32)),
}


@pytest.mark.daily(1)
def test_a_wrong_batch_is_refused_and_the_next_one_runs(name: str, engine: Engine, opened: Open) -> None:
    if name == "ref":
        return  # for tests: its callers are right
    session = opened(engine.plan)
    before = _logits(session, _steps()[:1])
    for batch in WRONG.values():
        with pytest.raises(RequestError):
            session.run(batch)
    np.testing.assert_array_equal(before, _logits(session, _steps()[:1]))


def test_an_input_that_sessions_do_not_give_is_refused(engine: Engine, opened: Open) -> None:
    asked = dataclasses.replace(engine.plan.inputs[0], name="adapters")
    changed = dataclasses.replace(engine.plan, inputs=(*engine.plan.inputs, asked))
    with pytest.raises(EngineError, match=r"asks for (an|the) input(.|\n)*adapters \(i32 by tokens\)"):
        opened(changed)
