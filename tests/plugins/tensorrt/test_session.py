"""Sessions of TensorRT engines on the emulated GPU: the tokens of `ref`, the real plugin and kernels in between."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.compare.compare import CompareOptions, compare
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import Engine, open_engine
from ingot.errors import CapacityError, EngineError, TargetError, UsageError
from ingot.plan import Plan
from ingot.plugins.cuda.step_tables import StepTables
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.plugins.tensorrt import tensors
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import LoadedEngine
from ingot.step_io import Session, StepBatch
from tests.hall.planted import Bytes, replant
from tests.handmade import write_model
from tests.plugins.cuda.decode_steps import compare_decode
from tests.plugins.tensorrt.emulated_runtime import EmulatedContext, EmulatedTensorRt
from tests.plugins.tensorrt.emulated_target import LIBRARY, EmulatedLibrary, header

NAME = "tensorrt-rtx/sm89"
PROMPTS = [[5, 9, 3, 7, 11], [1, 7], list(range(3, 40))]
TOLERANCE = {"f32": 2e-5, "bf16": 3e-2}  # of the range of the logits


@pytest.fixture
def rtx(gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A GPU of sm_89 and an emulated library. Gives: (folder, family, options) → an engine."""
    monkeypatch.setenv("INGOT_EMULATED_SM", "89")
    library = EmulatedLibrary(gpu, monkeypatch)

    def make(folder: Path, family: str, **options: Any) -> Path:
        config = dict(find_family(family).tiny)
        heads = config.get("num_attention_heads")
        config |= {"head_dim": 16} if "head_dim" in config else {"hidden_size": 16 * int(str(heads))} if heads else {}
        config |= options.pop("config", {})
        write_model(folder / "m", config)
        stored = options.pop("stored", None)
        convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c", dtype=stored))
        options = {"target": NAME, "tokens_per_block": 16, "max_batch_size": 6, "max_num_tokens": 48, **options}
        build(BuildConfig(**options), folder / "c", folder / "e")
        library.load(folder / "e", library.networks[-1])
        return folder / "e"

    return make


def _emulated() -> EmulatedTensorRt:
    found = sys.modules[LIBRARY.module]
    assert isinstance(found, EmulatedTensorRt)
    return found


def _open(engine: Engine) -> Session:
    """The steps of the emulated library are those after the session was opened."""
    options = SessionOptions(num_blocks=(24,), directory=engine.directory)
    session = find_target(NAME).open_session(engine.plan, engine.weights, options)
    _emulated().steps.clear()
    return session


def _ref(engine: Engine) -> Session:
    return RefSession(engine.plan, engine.weights, SessionOptions(num_blocks=engine.plan.in_each(24)))


def _generate(engine: Path, make: Callable[[Engine], Session], prompts: list[list[int]], count: int) -> dict[str, Any]:
    opened = open_engine(engine)
    loaded = LoadedEngine(engine=opened, session=make(opened), limits=opened.plan.limits)
    with ModelRunner(loaded, RuntimeConfig(enable_prefix_cache=False)) as runner:
        out = runner.generate(prompts, max_new_tokens=count, end_id=-1, return_dict=True, output_context_logits=True)
    return dict(out)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "f32"), ("llama", "bf16"), ("qwen3", "f32"), ("gpt2", "f32"), ("gemma3_text", "f32")],
)
def test_the_tokens_of_ref(rtx: Callable[..., Path], family: str, precision: str, tmp_path: Path) -> None:
    """Prompts in chunks, then decode; mixed steps run in one profile, decode steps in the other."""
    engine = rtx(tmp_path, family, precision=precision)
    found = _generate(engine, _open, PROMPTS, 6)
    texts = [row[0][: len(prompt) + 6].tolist() for row, prompt in zip(found["output_ids"], PROMPTS, strict=True)]
    expected = _generate(engine, _ref, [text[:-1] for text in texts], 1)["context_logits"]
    for prompt, text, logits, context in zip(PROMPTS, texts, expected, found["context_logits"], strict=True):
        tolerance = TOLERANCE[precision] * np.ptp(logits)
        assert np.abs(context - logits[: len(prompt)]).max() < tolerance
        chosen = logits[np.arange(len(prompt) - 1, len(text) - 1), text[len(prompt) :]]
        assert (chosen > logits[len(prompt) - 1 :].max(axis=-1) - 2 * tolerance).all()
    steps = _emulated().steps
    assert {name for name, _ in steps} == {"mixed", "decode"}
    assert _emulated().replays == sum(name == "decode" for name, _ in steps), "every decode step is a graph"
    assert max(tokens for name, tokens in steps if name == "decode") == 4, "three sequences fill a bucket of four"


@pytest.mark.daily(1)
@pytest.mark.parametrize("group", [1, 32])
def test_decode_with_any_number_of_sequences(rtx: Callable[..., Path], tmp_path: Path, group: int) -> None:
    """Whatever bucket ran in between: each has a context of its own, whose shapes its graph needs. 32 query heads of a
    KV head take the tile of prefill, idle rows too."""
    config = {"num_attention_heads": group, "num_key_value_heads": 1}
    engine = open_engine(rtx(tmp_path, "llama", precision="bf16", max_batch_size=8, config=config))
    session = _open(engine)
    compare_decode(session, engine, (5, 2, 7, 8, 1, 5, 8, 2), TOLERANCE["bf16"])
    assert [tokens for name, tokens in _emulated().steps if name == "decode"] == [8, 2, 8, 8, 1, 8, 8, 2]
    assert _emulated().replays == 8
    session.close()


def test_a_context_that_cannot_be_captured_runs_without_a_graph(
    rtx: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(rtx(tmp_path, "llama", precision="f32", max_batch_size=8))
    monkeypatch.setattr(EmulatedContext, "is_stream_capturable", lambda context, stream: False)
    session = _open(engine)
    compare_decode(session, engine, (5, 2, 7), TOLERANCE["f32"])
    assert _emulated().replays == 0
    session.close()


@pytest.mark.parametrize("what", ["a run", "an address", "a capture"])
def test_a_session_that_cannot_be_opened_keeps_nothing(
    rtx: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Also after the library has failed inside a capture: the GPU works on."""
    engine = open_engine(rtx(tmp_path, "llama", precision="f32"))
    driver = _emulated().driver
    before = (driver.emulated_held(), driver.emulated_retained())
    run = EmulatedContext.execute_async_v3

    def outside(context: EmulatedContext, stream: int) -> bool:
        return not driver.emulated_capturing() and run(context, stream)

    def never(*given: object) -> bool:
        return False

    name = "set_tensor_address" if what == "an address" else "execute_async_v3"
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedContext, name, outside if what == "a capture" else never)
        with pytest.raises(TargetError, match="cannot run the engine"):
            _open(engine)
    assert (driver.emulated_held(), driver.emulated_retained()) == before
    _open(engine).close()


def test_pools_stay_below_the_largest_tensor(
    rtx: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2^31 - 1 elements, here of as many as 41 blocks have, one of which is the spare one."""
    engine = open_engine(rtx(tmp_path, "llama", precision="f32"))
    kv, driver = engine.plan.caches[0], _emulated().driver
    free = find_target(NAME).kv_memory(engine.plan)
    assert free is not None
    driver.emulated_let_others_take(1 << 30)
    assert find_target(NAME).kv_memory(engine.plan) == free - (1 << 30)
    monkeypatch.setattr(tensors, "MOST_ELEMENTS", 41 * kv.v_block_bytes // 4)
    assert find_target(NAME).kv_memory(engine.plan) == 40 * kv.block_bytes
    options = SessionOptions(num_blocks=(41,), directory=engine.directory)
    with pytest.raises(CapacityError, match=r"larger than TensorRT's tensors may be(.|\n)*40 blocks(.|\n)*41 blocks"):
        find_target(NAME).open_session(engine.plan, engine.weights, options)
    driver.emulated_let_others_take(4 << 30)
    with pytest.raises(CapacityError, match="not enough free memory for the engine"):
        find_target(NAME).kv_memory(engine.plan)


def test_what_does_not_fit_is_refused(rtx: Callable[..., Path], tmp_path: Path) -> None:
    engine = open_engine(rtx(tmp_path, "llama", precision="f32"))
    _emulated().valid = False
    with pytest.raises(TargetError, match="refuses the engine on this GPU"):
        _open(engine)
    _emulated().valid = True
    network = engine.directory / "rank0.plan"
    whole = network.read_bytes()
    for data, word in (
        (header() + b"torn", "cannot read the engine"),
        (
            header((1, 7, 0, 9)) + b"whole",
            "needs TensorRT-RTX 1.7.0.9, which built this engine; this machine has .*1.7.1",
        ),
        (b"no engine at all" * 8, "not a TensorRT-RTX engine"),
        (b"", "cut short"),
    ):
        network.write_bytes(data)
        with pytest.raises(EngineError, match=word):
            _open(engine)
    network.write_bytes(whole)
    with pytest.raises(UsageError, match="threads"):
        find_target(NAME).open_session(
            engine.plan,
            engine.weights,
            SessionOptions(num_blocks=engine.plan.in_each(4), threads=2, directory=engine.directory),
        )


def test_another_gpu_is_named(rtx: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_target(NAME).run_blocker() is None
    assert find_target("tensorrt-rtx").run_blocker() is None
    monkeypatch.setenv("INGOT_EMULATED_SM", "90")
    for name in (NAME, "tensorrt-rtx"):
        assert "this machine has Emulated GPU (sm_90)" in (find_target(name).run_blocker() or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stored"), [("f32", None), ("bf16", None), ("f16", None), ("bf16", DType.BF16), ("f16", DType.F16)]
)
def test_verify_compares_weights_and_logits(
    rtx: Callable[..., Path], precision: str, stored: DType | None, tmp_path: Path
) -> None:
    """TensorRT shows nothing between a step's inputs and its logits, and verify says so."""
    engine = rtx(tmp_path, "llama", precision=precision, stored=stored)
    comparison = compare(engine, tmp_path / "c", CompareOptions(tokens=20))
    comparison.raise_if_wrong()
    assert comparison.layers == f"not compared: {NAME} has no taps"
    assert comparison.logits.positions == 20
    assert {name for name, _ in _emulated().steps} == {"mixed", "decode"}

    def half(plan: Plan, section: Bytes) -> None:
        weight = next(each for each in plan.weights if each.name == "layers.1/down.weight")
        begin = weight.pieces[0].offset
        section[begin : begin + weight.nbytes // 2] = 0

    planted = replant(engine, tmp_path / "planted", half)
    with pytest.raises(EngineError, match=r"is layers.1/down\n(.|\n)*weight layers.1/down.weight, row"):
        compare(planted, tmp_path / "c", CompareOptions(tokens=20)).raise_if_wrong()


def test_verify_finds_a_network_that_computes_something_else(
    rtx: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those of the source, but it writes keys and values one place too far."""
    engine = rtx(tmp_path, "llama", precision="f32")
    fill = StepTables.fill

    def shifted(self: StepTables, batch: StepBatch, padded: int | None = None) -> Any:
        counts, integers = fill(self, batch, padded)
        begin = self._layout.offsets["positions"]
        integers[begin : begin + len(batch.ids)] += 1
        return counts, integers

    monkeypatch.setattr(StepTables, "fill", shifted)
    with pytest.raises(EngineError, match="its logits are beyond their tolerance"):
        compare(engine, tmp_path / "c", CompareOptions(tokens=20)).raise_if_wrong()
