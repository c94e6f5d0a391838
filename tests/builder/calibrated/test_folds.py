"""Folds: the float model stays as it is whatever the factors; what has loud channels is folded, and loses less."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from ingot.builder.build import build
from ingot.builder.calibrated.methods import Inputs, Wanted, quantise_product
from ingot.builder.calibrated.quantize import quantize
from ingot.builder.calibrated.rewrite import StoredGraph
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import QuantizeOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import DType, to_float32
from tests.builder.calibrated.test_quantize import LLAMA, TEXT, checkpoint_of, write_tokenizer
from tests.builder.engines import engine_logits
from tests.graph_logits import logits_of_graph
from tests.handmade import TINY_GPT2, random_tensors, write_model

BIASES = {**LLAMA, "attention_bias": True, "mlp_bias": True}
GATED = {"down": "up", "out": "v", "lm_head": "norm"}  # product → what takes its fold


def logits_of(model: onnx.ModelProto, ids: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"input_ids": ids})[0]
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, GATED),
        (BIASES, GATED),
        ({**LLAMA, "model_type": "qwen2"}, GATED),
        ({**LLAMA, "num_key_value_heads": 1}, GATED),
        (TINY_GPT2, {"qkv": "attn_norm", "up": "mlp_norm"}),  # v is no weight of its own
        (find_family("olmo").tiny, {"down": "up", "out": "v"}),  # norms have no weights that could take a fold
        (find_family("nanochat").tiny, {"out": "v"}),
        (find_family("bitnet").tiny, {"down": "inner_norm", "out": "inner_norm"}),
    ],
)
def test_a_fold_changes_no_logits(tmp_path: Path, config: dict[str, object], expected: dict[str, str]) -> None:
    checkpoint = checkpoint_of(tmp_path, config)
    model, draw = onnx.load(checkpoint / "model.onnx"), np.random.default_rng(2)
    stored = StoredGraph(onnx.load(checkpoint / "model.onnx", load_external_data=False))
    ids = draw.integers(3, 29, (2, 11))
    exact, values = logits_of(model, ids), {each.name: each for each in model.graph.initializer}
    found = {}
    for leaf in filter(None, map(stored.leaf, values)):
        fold = stored.fold_before([leaf])
        if fold is None:
            continue
        found[leaf.name.split("/")[-2]] = (fold.divided or fold.vectors[0].name).split("/")[-2]
        factors = np.exp(draw.normal(0, 1, fold.tied.max() + 1)).astype(np.float32)
        changes = [(leaf.name, factors[fold.tied], leaf.transposed)]
        if fold.divided is not None:
            taker = stored.leaf(fold.divided)
            assert taker is not None
            changes.append((taker.name, 1 / factors, not taker.transposed))
        changes += [(each.name, 1 / factors, False) for each in fold.vectors]
        for name, factor, by_row in changes:
            each = numpy_helper.to_array(values[name])
            values[name].CopyFrom(numpy_helper.from_array(each * (factor[:, None] if by_row else factor), name))
    assert found == expected
    folded = logits_of(model, ids)
    assert np.abs(folded - exact).max() < 2e-5 * np.ptp(exact)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["w4g32", "w8a8"])
def test_loud_channels_of_values_and_gated_rows_are_folded(tmp_path: Path, precision: str) -> None:
    tensors, draw = random_tensors(BIASES), np.random.default_rng(4)
    loud = {"up_proj": np.exp(1.5 * draw.normal(size=88)), "v_proj": np.exp(1.5 * draw.normal(size=24))}
    quiet = {"down_proj": 1 / loud["up_proj"], "o_proj": 1 / loud["v_proj"].reshape(2, 1, 12).repeat(2, 1).reshape(-1)}
    for name, (_, bits) in list(tensors.items()):
        _, _, kind, part = ("..." + name).rsplit(".", 3)[-4:]
        factor = loud[kind][:, None][: bits.size] if kind in loud else quiet.get(kind)
        if factor is not None and (kind in loud or part == "weight"):
            factor = factor[:, 0] if bits.ndim == 1 and kind in loud else factor
            tensors[name] = (DType.F32, (to_float32(bits, DType.F32) * factor).astype(np.float32))
    model = write_model(tmp_path / "m", BIASES, tensors=tensors)
    write_tokenizer(model)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    report = quantize(QuantizeOptions(output_dir=tmp_path / "q", precision=precision), tmp_path / "c", TEXT)
    methods = {each.name: each.method for each in report.products}
    assert {"layers.0/down", "layers.1/attention_out"} <= {name for name, each in methods.items() if "folded" in each}
    onnx.checker.check_model(str(tmp_path / "q" / "model.onnx"), full_check=True)
    ids = draw.integers(3, 29, (2, 17))
    exact, found = logits_of_graph(tmp_path / "c", ids), logits_of_graph(tmp_path / "q", ids)
    assert np.sqrt(np.square(found - exact).mean()) < 0.05 * np.ptp(exact)
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "q", tmp_path / "f")
    assert np.abs(engine_logits(tmp_path / "f", ids) - found).max() < 1e-4 * np.ptp(exact)


def test_columns_that_share_a_factor_get_one() -> None:
    draw = np.random.default_rng(3)
    weights, x = draw.standard_normal((24, 32)).astype(np.float32), draw.standard_normal((90, 32)).astype(np.float32)
    x[:, 5] *= 100
    x[:, 13] *= 50
    tied = np.arange(32) % 8
    wanted = Wanted.of("w8a8", "auto", 32)
    found = quantise_product(lambda begin, end: weights[begin:end], 24, Inputs([x], 32), wanted, tied)
    assert found.fold is not None
    assert (found.fold == found.fold[:8][tied]).all()
    assert found.fold.argmax() % 8 == 5
