"""A product whose result is read twice, once to be added: the addition stays one of its own on GPU targets, and the
result keeps the type that its widest reader takes."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.engine import open_engine
from ingot.plan import Plan
from ingot.plugins.ref.session import RefSession
from ingot.plugins.registry import find_target
from ingot.plugins.target import SessionOptions
from tests.plugins.cpu.one_step import batch_of
from tests.plugins.cuda.decode_steps import wide_group

TOLERANCE = {"f32": 2e-5, "bf16": 2e-2}  # of the range of the logits
IDS = (np.arange(11) * 5 % 61).astype(np.int64)

_STREAM, _PRODUCT = "layers.0/attn/residual", "layers.0/attn/out/matmul"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads of 16 dims for 48 hidden ones: the output product is square."""
    return wide_group(tmp_path_factory.mktemp("plain"), group=3)


def _read_again(checkpoint: Path, folder: Path, *, by_product: bool) -> Path:
    """The same model, whose residual stream gets the attention's output once more, through another product or as it
    is."""
    model = onnx.load(checkpoint / "model.onnx", load_external_data=False)
    nodes = list(model.graph.node)
    place = next(index for index, node in enumerate(nodes) if _STREAM in node.output) + 1
    for node in nodes[place:]:
        for index, name in enumerate(node.input):
            if name == _STREAM:
                node.input[index] = "again/sum"
    summand = "again/product" if by_product else _PRODUCT
    made = [onnx.helper.make_node("Add", [_STREAM, summand], ["again/sum"], "again/sum")]
    if by_product:
        inputs = [_PRODUCT, "layers.0/attn/out/transpose"]
        made.insert(0, onnx.helper.make_node("MatMul", inputs, ["again/product"], "again/product"))
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:place], *made, *nodes[place:]])
    out = Path(shutil.copytree(checkpoint, folder / "c"))
    (out / "model.onnx").write_bytes(model.SerializeToString())
    return out


def _products(plan: Plan) -> int:
    return sum(step.op == "matmul" for step in plan.steps)


@pytest.mark.parametrize("by_product", [False, True])
def test_the_addition_is_no_part_of_the_product(
    gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path, by_product: bool
) -> None:
    again = _read_again(checkpoint, tmp_path, by_product=by_product)
    for target in ("cuda/sm90", "tensorrt-rtx/sm89"):
        config = BuildConfig(target=target, precision="bf16", dry_run=True)
        plain, plan = (build(config, source, tmp_path / "never").plan for source in (checkpoint, again))
        assert _products(plan) == _products(plain) + by_product, "no product is computed twice"
        ops = [step.op for step in plan.steps]
        output = plan.steps[ops.index("matmul", ops.index("paged_attention"))]
        assert output.inputs[3] == "", "the other reader wants it without the residual"


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("by_product", [False, True])
def test_both_readers_get_what_they_read(
    gpu: ctypes.CDLL, checkpoint: Path, tmp_path: Path, by_product: bool, precision: str
) -> None:
    again = _read_again(checkpoint, tmp_path, by_product=by_product)
    config = BuildConfig(
        target="cuda/sm90", precision=precision, tokens_per_block=16, max_batch_size=2, max_num_tokens=16
    )
    build(config, again, tmp_path / "e")
    engine = open_engine(tmp_path / "e")
    batch = batch_of([(0, len(IDS))], [[1]], range(len(IDS)), ids=IDS.astype(np.int32), want_logits=True)
    options = SessionOptions(num_blocks=(2,))
    session = find_target("cuda/sm90").open_session(engine.plan, engine.weights, options)
    found = session.run(batch).logits
    session.close()
    if precision == "f32":
        expected = onnxruntime.InferenceSession(again / "model.onnx").run(None, {"input_ids": IDS[None]})[0][0]
    else:
        expected = RefSession(engine.plan, engine.weights, options).run(batch).logits
    assert found is not None
    assert np.abs(found - expected).max() < TOLERANCE[precision] * np.ptp(expected)
