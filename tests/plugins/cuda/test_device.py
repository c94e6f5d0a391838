"""What a session takes of a GPU: memory that is free, and nothing that it keeps, whatever fails."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType
from ingot.engine import Engine, open_engine
from ingot.errors import CapacityError, EngineError, TargetError
from ingot.plugins.cuda import products as products_module
from ingot.plugins.cuda import target as target_module
from ingot.plugins.cuda.bind import bind
from ingot.plugins.cuda.decode_graphs import DecodeGraphs
from ingot.plugins.cuda.estimate import _nowhere
from ingot.plugins.cuda.gpu import Device, find_gpus
from ingot.plugins.cuda.plan_facts import scratch_bytes, weight_places
from ingot.plugins.cuda.products import WORKSPACE_BYTES, Products
from ingot.plugins.cuda.session import CudaSession, device_bytes
from ingot.plugins.cuda.shapes import product_rows
from ingot.plugins.cuda.work import Multiply
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from ingot.runtime.session import load_engine
from tests.handmade import write_model
from tests.plugins.cpu.one_step import batch_of
from tests.plugins.cuda.emulation import one_context

Held = Callable[[], int]


@pytest.fixture
def held(gpu: ctypes.CDLL) -> Held:
    """How many things are held of the GPU and of cuBLASLt."""
    library = ctypes.CDLL(products_module._NAMES[0])

    def count() -> int:
        return int(gpu.emulated_held()) + int(gpu.emulated_retained()) + int(library.emulated_products_held())

    return count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder / "m", {**find_family("llama").tiny, "head_dim": 16})
    convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
    return folder


@pytest.fixture
def engine(gpu: ctypes.CDLL, folder: Path) -> Engine:
    if not (folder / "e").is_dir():
        config = BuildConfig(
            target="cuda/sm90", precision="bf16", tokens_per_block=16, max_batch_size=4, max_num_tokens=48
        )
        build(config, folder / "c", folder / "e")
    return open_engine(folder / "e")


def _open(engine: Engine, num_blocks: int = 8) -> CudaSession:
    session = find_target("cuda/sm90").open_session(
        engine.plan, engine.weights, SessionOptions(num_blocks=engine.plan.in_each(num_blocks))
    )
    assert isinstance(session, CudaSession)
    return session


@contextlib.contextmanager
def _device() -> Iterator[Device]:
    with contextlib.closing(Device(find_gpus().gpus[0])) as device:
        yield device


def test_one_context_serves_many_devices(gpu: ctypes.CDLL) -> None:
    """The driver makes it for the first device and destroys it with the last."""
    made = gpu.emulated_contexts()
    for _ in range(2):
        with _device():
            pass
    assert gpu.emulated_contexts() == made + 2
    with one_context():
        for _ in range(3):
            with _device():
                pass
    assert gpu.emulated_contexts() == made + 3


def test_a_device_that_cannot_be_opened_keeps_nothing(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    monkeypatch.setattr(Device, "enter", _fails)
    with pytest.raises(TargetError, match="on purpose"):
        Device(find_gpus().gpus[0])
    assert held() == before


def _fails(*given: object) -> None:
    raise TargetError("this fails on purpose")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["_load_kernels", "_capture_decode"])
def test_a_session_that_cannot_be_opened_keeps_nothing(
    held: Held, engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = held()
    monkeypatch.setattr(CudaSession, what, _fails)
    with pytest.raises(TargetError, match="on purpose"):
        _open(engine)
    assert held() == before


def test_a_session_gives_everything_back(held: Held, engine: Engine) -> None:
    before = held()
    session = _open(engine)
    session.run(batch_of([(0, 5)], [[0]], [4], ids=np.arange(5, dtype=np.int32)))
    assert held() > before
    session.close()
    assert held() == before


def test_everything_is_given_back_after_a_fault(held: Held, gpu: ctypes.CDLL) -> None:
    before = held()
    device = Device(find_gpus().gpus[0])
    for _ in range(3):
        ctypes.memset(device.allocate(256) + 256, 0, 1)  # behind the end: the emulation says so when it is freed
    device.pinned(64)
    with pytest.raises(TargetError, match="CUDA driver"):
        device.close()
    assert held() == before


def test_without_the_library_an_engine_that_needs_it_is_refused(
    engine: Engine, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words, and nothing is kept."""
    before = held()
    monkeypatch.setattr(products_module, "find_library", lambda: "it is not here")
    with pytest.raises(TargetError, match=r"no cuBLASLt, which the engine needs(.|\n)*it is not here") as refused:
        Products(0, 0)
    assert refused.value.hint == "pip install nvidia-cublas, or build the engine with --gemm_plugin disable"
    monkeypatch.setattr(target_module, "find_library", lambda: "it is not here")
    with pytest.raises(TargetError, match="with cuBLASLt: it is not here, or build the engine with --gemm_plugin"):
        _open(engine)
    assert held() == before


def test_kernels_of_the_plan_say_whether_the_library_multiplies(
    gpu: ctypes.CDLL, folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of own kernels runs without it, and takes no memory for it or for its sums."""
    config = BuildConfig(
        target="cuda/sm90",
        precision="bf16",
        tokens_per_block=16,
        max_batch_size=4,
        max_num_tokens=48,
        gemm_library=False,
    )
    build(config, folder / "c", folder / "own")
    own = open_engine(folder / "own")
    library = {"matmul.bf16.sm80.cublaslt", "matmul.bf16.sm90a.cublaslt"}
    for built, kernels in ((engine, library), (own, {"matmul.bf16.sm80"})):
        assert {step.kernel for step in built.plan.steps if step.op == "matmul"} == kernels
    sums = scratch_bytes(engine.plan).sums
    assert sums > scratch_bytes(own.plan).sums == 0
    code = weight_places(engine.plan)[1] - weight_places(own.plan)[1]
    assert device_bytes(engine.plan) - device_bytes(own.plan) == WORKSPACE_BYTES + sums + code
    with contextlib.closing(_open(engine)) as session:
        assert any(isinstance(work, Multiply) for bound in session._steps for work in bound.work)
    monkeypatch.setattr(products_module, "find_library", lambda: "it is not here")
    with contextlib.closing(_open(own)) as session:
        assert not any(isinstance(work, Multiply) for bound in session._steps for work in bound.work)
        found = session.run(batch_of([(0, 40)], [range(3)], [39], want_logits=True))
        assert found.logits is not None
        assert np.isfinite(found.logits).all()


def test_codes_that_a_library_should_multiply_are_refused(engine: Engine) -> None:
    weights = [
        dataclasses.replace(weight, dtype=DType.W8) if weight.layout == "row" and len(weight.shape) == 2 else weight
        for weight in engine.plan.weights
    ]
    plan = dataclasses.replace(engine.plan, weights=tuple(weights))
    with pytest.raises(EngineError, match="cuBLASLt multiplies no codes"):
        bind(plan, _nowhere(plan))


def test_a_cast_to_another_type_than_that_of_its_buffer_is_refused(engine: Engine) -> None:
    attrs = {"to": "f16"}
    steps = (dataclasses.replace(each, attrs=attrs) if each.op == "cast" else each for each in engine.plan.steps)
    plan = dataclasses.replace(engine.plan, steps=tuple(steps))
    with pytest.raises(EngineError, match=r"layers.1/attention_out.cast(.|\n)*expected: another buffer"):
        bind(plan, _nowhere(plan))


def test_a_product_without_an_algorithm_keeps_nothing(held: Held, gpu: ctypes.CDLL) -> None:
    before = held()
    with (
        _device() as device,
        contextlib.closing(Products(device.allocate(WORKSPACE_BYTES), 0)) as products,
        pytest.raises(TargetError, match="cublasLtMatmulAlgoGetHeuristic"),
    ):
        products._plan(4, 8, 16, DType.BF16, DType.F16, 16)
    assert held() == before


def test_an_exception_inside_a_capture_ends_it(held: Held, gpu: ctypes.CDLL) -> None:
    """A stream that still captures would refuse to wait, and the next capture."""
    with _device() as device:
        place, before = device.allocate(256), held()
        with pytest.raises(TargetError, match="on purpose"):
            device.capture(_fails)
        assert held() == before
        device.wait()
        data = np.arange(64, dtype=np.int32)
        graph = device.capture(lambda: device.send(place, data))
        device.replay(graph)
        found = np.zeros_like(data)
        device.fetch(found, place)
        device.wait()
        assert found.tolist() == data.tolist()


def test_graphs_are_captured_before_the_first_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of every bucket; a step of any number of sequences replays one of them, and launches nothing by itself."""
    captured: list[int] = []
    capture = DecodeGraphs.capture

    def counted(graphs: DecodeGraphs, counts: object, launch: object) -> None:
        captured.append(counts.tokens)  # type: ignore[attr-defined]
        capture(graphs, counts, launch)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "capture", counted)
    session = _open(engine)
    assert captured == [1, 2, 4]
    monkeypatch.setattr(Device, "capture", _fails)
    monkeypatch.setattr(CudaSession, "_launch_all", _fails)
    for sequences in (1, 2, 3, 4):
        parts = [(0, 1)] * sequences
        session.run(batch_of(parts, [[block] for block in range(sequences)], range(sequences)))
    with pytest.raises(TargetError, match="on purpose"):
        session.run(batch_of([(0, 2)], [[0]], [1]))
    session.close()


@pytest.mark.slow
def test_products_share_their_plans_among_numbers_of_rows(engine: Engine) -> None:
    session = _open(engine)
    for tokens in range(1, 49):
        ids = np.arange(tokens, dtype=np.int32) % engine.plan.vocab_size
        session.run(batch_of([(0, tokens)], [[0, 1, 2]], [tokens - 1], ids=ids))
    assert session._products is not None
    rows = {shape[0] for shape in session._products._plans}
    assert rows == {24, 32, 40, 48}, "fewer rows are computed without the library"
    session.close()


def test_rows_of_a_product() -> None:
    for rows in range(1, 5000):
        found = product_rows(rows, 1 << 20)
        assert rows <= found <= max(8, rows + 7, rows * 9 / 8)
        assert product_rows(rows, rows + 1) <= rows + 1
    assert len({product_rows(rows, 8192) for rows in range(1, 8193)}) < 70


def test_the_cache_gets_what_is_free(gpu: ctypes.CDLL, engine: Engine) -> None:
    target, plan = find_target("cuda/sm90"), engine.plan
    alone = target.kv_memory(plan)
    assert alone is not None
    gpu.emulated_let_others_take(1 << 30)
    assert target.kv_memory(plan) == alone - (1 << 30)
    gpu.emulated_let_others_take((4 << 30) - (300 << 20))
    with pytest.raises(CapacityError, match=r"GPU 0, Emulated GPU(.|\n)*more than(.|\n)*300 MiB free of 4 GiB"):
        load_engine(engine.directory, RuntimeConfig())


def test_what_a_session_takes_is_known_before(gpu: ctypes.CDLL, engine: Engine) -> None:
    """To the byte, but that small allocations take 256."""
    session = _open(engine, num_blocks=8)
    expected = device_bytes(engine.plan) + 8 * engine.plan.block_bytes
    assert expected <= gpu.emulated_taken() < expected + 4096
    session.close()
