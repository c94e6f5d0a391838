"""auto keeps the codes of a quantised checkpoint wherever a format of the engine holds them."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from ingot.builder.build import BuildReport, build
from ingot.builder.kept import Grid, read_grid
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.header import read_gguf_header
from ingot.dtypes import DType, to_float32
from ingot.engine import read_manifest
from ingot.inspect import inspect
from ingot.plan import Step
from tests import gguf_files
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.convert.gguf.test_architectures import CASES as ARCHITECTURES
from tests.convert.gguf.test_architectures import write_case
from tests.convert.gguf.test_blocks import IDS, write_llama
from tests.convert.quantised.test_formats import CASES, compressed
from tests.graph_logits import logits_of_graph
from tests.spanning import often, spanning

# Relative, of the numbers that float16 rounds, as root mean square. An offset is rounded by itself: where a weight is
# much smaller than the offset, as in files of trained models, the error is as much larger relative to the weight.
HALF = 2.0**-12
# case → (precision of its products, what packing may change of a weight)
KEPT: dict[str, tuple[set[str], float]] = {
    "awq g32": ({"w4tsg32"}, 0),
    "awq rows, without zero points": ({"w4tg128"}, 0),
    "gptq symmetric v2 that says v1": ({"w4tg32"}, 0),
    "gptq 2 bits": ({"w4tsg16"}, 0),
    "gptq 3 bits": ({"w3tg32"}, 0),
    "gptq v1 asymmetric, desc_act": ({"w4tsg32"}, 0),
    "ct 4 bits asymmetric, actorder": ({"w4tsg32"}, 0),
    "auto-round as gptq": ({"w4tsg32"}, 0),
    "auto-round, zero points as they are": ({"w4tsg32"}, 0),
    "auto-round 2 bits, symmetric": ({"w2tg32"}, 0),
    "auto-round as awq": ({"w4tsg32"}, 0),
    "ct 3 bits": ({"w3tg128"}, 0),
    "ct 3 bits, whole fields in words": ({"w4tsg32"}, 0),
    "ct nvfp4": ({"w4tg16"}, 2.0**-23),
    "ct mxfp4": ({"w4tg32"}, 0),
    "modelopt nvfp4 that says fp8": ({"w4tg16"}, 2.0**-23),
    "fp8 blocks of 32 columns": ({"f8g32"}, 0),
    **dict.fromkeys(("ct fp8 tensor", "fp8 rows", "modelopt fp8", "torchao fp8"), ({"f8"}, 0)),
    **dict.fromkeys(("bnb nf4", "bnb fp4"), ({"w4tg32", "w4tg128"}, HALF)),
    "hqq 4 bits": ({"w4tsg32", "w4tsg128"}, HALF),
    "hqq 3 bits": ({"w4tsg32"}, HALF),
    "bitnet": ({"w2tg128"}, 0),
    "gptq 8 bits": ({"w8tsg128"}, 0),
    "gptq, bits by module": ({"w8tg32"}, 0),
    "ct 8 bits": ({"w8"}, 0),
    "ct int8": ({"w8"}, 0),
    "ct int8 asymmetric, actorder": ({"w8tsg32"}, HALF),
    "torchao int4": ({"w8tsg32"}, 0),
    "bnb int8": ({"w8"}, 2.0**-23),
}
# type → (group of its products, what packing may change of one); one block is a row of some, whose group is 128
GGUF: dict[int, tuple[str, float]] = {2: ("w4t", 0), 3: ("w4ts", 0), 20: ("w4t", 0), 39: ("w4t", 0)}
GGUF |= {10: ("w2ksg16", 0), 11: ("w3kg16", 0), 12: ("w4ksg32", 0), 23: ("w4tg32", HALF)}
GGUF |= {6: ("w8t", 0), 7: ("w8ts", 0), 8: ("w8t", 0), 13: ("w5ksg32", 0), 14: ("w6kg16", 0)}
GGUF |= {16: ("w3tg32", HALF), 17: ("w4tg16", HALF), 18: ("w4tg32", HALF), 19: ("w3tg32", HALF), 21: ("w4tg32", HALF)}
GGUF |= {22: ("w4tg16", HALF), 29: ("w4tg16", HALF), 34: ("w2t", 0), 35: ("w2t", 0), 40: ("w4tg16", 0)}
GGUF |= {41: ("w2t", 0), 42: ("w2tg64", 0)}


def built(folder: Path, model: Path, sum_parts: int = 1) -> BuildReport:
    convert(ConvertOptions(model_dir=model, output_dir=folder / "checkpoint"))
    config = BuildConfig(target="ref", activations="bf16", sum_parts=sum_parts)
    return build(config, folder / "checkpoint", folder / "engine")


def products(report: BuildReport) -> dict[str, tuple[str, float]]:
    """Weight of each product but lm_head → (precision, what packing has changed)"""
    steps = [step for step in report.plan.steps if "group" in step.attrs and step.name != "lm_head"]
    errors = read_manifest(report.output_dir).weight_errors
    return {step.inputs[1]: (_precision(step), errors.get(step.inputs[1], 0.0)) for step in steps}


def _precision(step: Step) -> str:
    name = f"{step.kernel.split('.')[1].removesuffix('a8')}g{step.attrs['group']}"
    return name.removesuffix("g0")


@pytest.mark.parametrize(("group", "kept"), [(16, 16), (48, 16), (96, 32), (128, 128), (256, 128), (768, 128), (40, 0)])
def test_no_group_of_the_source_is_cut(group: int, kept: int) -> None:
    """768 is a whole row, whose scale is that of any group."""
    codes, scale = gs.Constant("codes", np.zeros((2, 768), np.uint8)), gs.Variable("scale")
    assert Grid(codes=codes, signed=False, group=group, scale=scale).engine_group == kept


@pytest.mark.daily(6)
@pytest.mark.parametrize("name", spanning(CASES, lambda name: str(KEPT.get(name))))
def test_a_format(tmp_path: Path, name: str) -> None:
    """What cannot be kept is w8: groups of odd sizes, scales of columns."""
    settings, packer, _ = CASES[name]
    write.write_model(tmp_path / "model", settings, packer)
    report = built(tmp_path, tmp_path / "model")
    found = products(report)
    wanted, bound = KEPT.get(name, ({"w8"}, 0.02))
    assert ("no matmul can keep its codes" in " ".join(report.notes)) == (name not in KEPT)
    assert {precision for precision, _ in found.values()} == wanted
    assert max(error for _, error in found.values()) <= bound


FIRST = {wanted: kind for kind, (wanted, _) in reversed(GGUF.items())}  # of each format of an engine


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", often(GGUF, FIRST.values()))
def test_a_type_of_gguf(tmp_path: Path, kind: int) -> None:
    write_llama(tmp_path, kind)
    report = built(tmp_path, tmp_path / "model.gguf")
    wanted, bound = GGUF[kind]
    for name, (precision, error) in products(report).items():
        if "attention_out" not in name:  # whose weight is float16
            found = precision.removesuffix("g128").removesuffix("g32" * ("g" not in wanted))
            # where one block is a row, 8 bits are w8, and groups may be larger
            assert found in (wanted, wanted.replace("w8t", "w8"), wanted.removesuffix("g64")), name
            assert error <= bound, name
    exact = logits_of_graph(tmp_path / "checkpoint", IDS)
    assert np.sqrt(((engine_logits(tmp_path / "engine", IDS) - exact) ** 2).mean()) < 0.2 * exact.std()


def test_the_error_of_offsets_is_relative_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of Q4_K around zero: value x scale and the offset are several times larger, and each is rounded where an
    engine has no units: sums have parts."""
    ratios = []

    def centred(rng: np.random.Generator, kind: int, shape: tuple[int, ...]) -> tuple[gguf_files.Stored, np.ndarray]:
        count = int(np.prod(shape)) // 256
        factors, codes = rng.integers(32, 64, (count, 8)), rng.binomial(15, 0.5, (count, 8, 32))
        halves = (0.002 * rng.uniform(0.5, 1.5, (count, 1)) * [1, 7.5]).astype(np.float16)
        scaled = halves[:, :1, None].astype(np.float64) * factors[..., None] * codes
        offsets = halves[:, 1:, None].astype(np.float64) * factors[..., None]
        values = scaled - offsets
        ratios.append(np.sqrt((scaled**2 + offsets**2).mean() / (values**2).mean()))
        blocks = gguf_files.q4_k(halves, factors, factors, codes)
        decode = gguf_files.BLOCKS[kind][-1]
        assert [decode(blocks, i) for i in range(256)] == values[0].reshape(-1).tolist()
        return (kind, shape, blocks), values.astype(np.float32).reshape(shape)

    monkeypatch.setattr(gguf_files, "random_blocks", centred)
    write_llama(tmp_path, 12)
    found = products(built(tmp_path, tmp_path / "model.gguf", sum_parts=2))
    errors = [error for precision, error in found.values() if precision == "w4tsg32"]
    assert len(errors) >= 2
    assert 3 * HALF < min(errors) <= max(errors) <= max(ratios) * HALF


def test_members_of_a_product_in_different_formats(tmp_path: Path) -> None:
    """Panels have tables and shifts of their own; where a panel would hold two of them, the product is taken apart."""
    write_llama(tmp_path, 2, kinds={"ffn_up": 3, "attn_k": 20})
    report = built(tmp_path, tmp_path / "model.gguf")
    found = products(report)
    assert found["layers.0/gate_up.weight"] == ("w4tsg128", 0)
    assert [found[f"layers.0/{part}.weight"] for part in "qkv"] == [("w4tg128", 0)] * 3
    text = inspect(tmp_path / "engine").text
    assert "gguf Q4_0 i4, gguf Q4_1 u4 with offset  w4tsg128" in text
    assert "matmuls keep their codes" in " ".join(report.notes)


@pytest.mark.parametrize(("axis", "found"), [(-1, True), (2, True), (1, False), (None, False)])
def test_scales_that_are_spread_in_another_way(axis: int | None, found: bool) -> None:
    """In a graph of one's own, the columns of all groups may share scales; here there are as many as groups."""
    place = [onnx.StringStringEntryProto(key="location", value="weights")]
    stored = [
        onnx.TensorProto(name=name, data_type=kind, dims=dims, data_location="EXTERNAL", external_data=place)
        for name, kind, dims in (
            ("codes", onnx.TensorProto.UINT4, (16, 256)),
            ("scale", onnx.TensorProto.FLOAT, (16, 16)),
        )
    ]
    integers = {"of_groups": [0, 16, 16], "axis": [axis or 0], "rows": [0, 256]}
    stored += [onnx.numpy_helper.from_array(np.array(each), name) for name, each in integers.items()]
    nodes = [
        onnx.helper.make_node("Cast", ["codes"], ["values"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Reshape", ["values", "of_groups"], ["groups"]),
        onnx.helper.make_node("Unsqueeze", ["scale", "axis"], ["spread"]),
        onnx.helper.make_node("Mul", ["groups", "scale" if axis is None else "spread"], ["product"]),
        onnx.helper.make_node("Reshape", ["product", "rows"], ["weight"]),
    ]
    weight = onnx.helper.make_tensor_value_info("weight", onnx.TensorProto.FLOAT, [16, 256])
    graph = gs.import_onnx(onnx.helper.make_model(onnx.helper.make_graph(nodes, "of a weight", [], [weight], stored)))
    assert (read_grid(graph.outputs[0]) is not None) == found


def test_a_row_of_the_smallest_scales(tmp_path: Path) -> None:
    """2^-149, the smallest of float32, is less than any power of two that a float16 fills."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[write.Tensors, write.Array]:
        tensors, weight = write.packed(4, 32)(rng, n, k)
        scales = to_float32(tensors["weight_scale"][1], DType.BF16)
        scales[0] = 2.0**-149
        return tensors | {"weight_scale": (DType.F32, scales)}, weight

    settings = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    write.write_model(tmp_path / "model", settings, pack)
    for precision, error in products(built(tmp_path, tmp_path / "model")).values():
        assert (precision, error) == ("w4tg32", 0)


def test_another_precision_takes_the_values(tmp_path: Path) -> None:
    write_llama(tmp_path, 2)
    built(tmp_path, tmp_path / "model.gguf")
    report = build(BuildConfig(target="ref", precision="w8"), tmp_path / "checkpoint", tmp_path / "other")
    assert {precision for precision, _ in products(report).values()} == {"w8"}
    report = build(BuildConfig(target="ref", lm_head_precision="bf16"), tmp_path / "checkpoint", tmp_path / "other")
    assert report.plan.steps[-1].kernel.startswith("matmul.bf16")


@pytest.mark.slow
def test_a_number_that_multiplies_a_weight(tmp_path: Path) -> None:
    """Command A+ halves what its shared experts make: their codes stay, and the scales of rows have the factor."""
    case = ARCHITECTURES["cohere2moe"]
    change = {"hidden_size": 64, "intermediate_size": 32, "mlp_layer_types": ["sparse"] * 3}
    settings = {**case.settings, "leading_dense_block_count": 0, "expert_feed_forward_length": 32}
    path, _ = write_case(tmp_path, "cohere2moe", dataclasses.replace(case, change=change, settings=settings))
    header, data, rng = read_gguf_header(path), path.read_bytes(), np.random.default_rng(1)
    tensors = dict[str, gguf_files.Stored]()
    for key, each in header.tensors.items():
        values = np.frombuffer(data[each.offset : each.offset + each.nbytes], np.float32).reshape(each.shape)
        quantised = "_shexp" in key or "_exps" in key
        tensors[key] = gguf_files.random_blocks(rng, 2, each.shape)[0] if quantised else gguf_files.floats(values)
    report = built(tmp_path, gguf_files.write_gguf(tmp_path / "q.gguf", dict(header.settings), tensors))
    shared = [kept for name, kept in products(report).items() if "/down" in name or "/gate_up" in name]
    assert shared == [("w4tg32", 0.0)] * 6
    exact = logits_of_graph(tmp_path / "checkpoint", IDS)
    assert np.sqrt(((engine_logits(tmp_path / "engine", IDS) - exact) ** 2).mean()) < 0.05 * exact.std()


@pytest.mark.slow
def test_experts_of_several_formats(tmp_path: Path) -> None:
    """They stay one weight, whose codes become bytes where some are: the values are the same."""
    case = ARCHITECTURES["qwen3moe"]
    change = {"hidden_size": 64, "moe_intermediate_size": 32}
    path, _ = write_case(tmp_path, "qwen3moe", dataclasses.replace(case, change={**case.change, **change}))
    header, data, rng = read_gguf_header(path), path.read_bytes(), np.random.default_rng(1)
    tensors = dict[str, gguf_files.Stored]()
    for key, each in header.tensors.items():
        if "_exps" in key:  # 4 bits with a table, 4 bits, 8 bits
            kind = 20 if "down" in key else 2 if "gate" in key else 8
            tensors[key], _ = gguf_files.random_blocks(rng, kind, each.shape)
        else:
            values = np.frombuffer(data[each.offset : each.offset + each.nbytes], np.float32)
            tensors[key] = gguf_files.floats(values.reshape(each.shape))
    report = built(tmp_path, gguf_files.write_gguf(tmp_path / "q.gguf", dict(header.settings), tensors))
    errors = read_manifest(report.output_dir).weight_errors
    found = {
        step.op: (step.kernel.split(".")[1], {errors[name] for name in step.inputs if name in errors})
        for step in report.plan.steps
        if step.op.startswith("moe_")
    }
    assert found["moe_gate_up"] == ("w8t", {0.0})
    assert found["moe_down"] == ("w4t", {0.0})
