"""Weight expressions give the values that ONNX's evaluator gives, in any row block, without reading names."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ingot.builder.expressions import WeightReader, check_sources, key, matrix_shape, stored_dtypes
from ingot.builder.graph import Graph
from ingot.dtypes import DType, from_float32
from ingot.errors import BuildError, CheckpointError, PassError
from tests.handmade import checked
from tests.passes.graphs import GraphMaker

RANDOM = np.random.default_rng(3)


class ExternalMaker(GraphMaker):
    """A GraphMaker whose weights lie in a file at unaligned offsets."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / "weights.bin"
        self._path.write_bytes(b"?")

    def external(self, dtype: DType, *shape: int) -> str:
        offset = self._path.stat().st_size
        bits = from_float32(RANDOM.normal(0, 1, shape).astype(np.float32), dtype)
        self._path.write_bytes(self._path.read_bytes() + bits.tobytes() + b"!")
        tensor = onnx.TensorProto(name=f"e{offset}", data_type=dtype.onnx, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        for name, value in (("location", "weights.bin"), ("offset", offset), ("length", bits.nbytes)):
            tensor.external_data.add(key=name, value=str(value))
        self._initializers.append(tensor)
        return tensor.name

    def float32(self, dtype: DType, *shape: int) -> str:
        return self.node("Cast", self.external(dtype, *shape), to=TensorProto.FLOAT)

    def expected(self, name: str, folder: Path) -> npt.NDArray[np.float32]:
        """The value of an expression, from ONNX."""
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
        graph = helper.make_graph(self._nodes, "g", [], outputs, self._initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        onnx.load_external_data_for_model(model, str(folder))
        result: npt.NDArray[np.float32] = ReferenceEvaluator(model).run(None, {})[0]  # type: ignore[index]
        return result


def weight_of(graph: Graph) -> object:
    return graph.logits.inputs[0].inputs[1]


EXPRESSIONS = {
    "f32": lambda g: g.external(DType.F32, 7, 5),
    "bf16": lambda g: g.float32(DType.BF16, 7, 5),
    "f16 rounded to bf16": lambda g: g.node(
        "Cast", g.node("Cast", g.external(DType.F16, 7, 5), to=TensorProto.BFLOAT16), to=TensorProto.FLOAT
    ),
    "transposed": lambda g: g.node("Transpose", g.float32(DType.BF16, 5, 7), perm=[1, 0]),
    "not transposed": lambda g: g.node("Transpose", g.float32(DType.F16, 7, 5), perm=[0, 1]),
    "rows of two": lambda g: g.node("Concat", g.float32(DType.F16, 3, 5), g.external(DType.F32, 4, 5), axis=0),
    "transposed, then columns": lambda g: g.node(
        "Concat",
        g.node("Transpose", g.node("Concat", g.external(DType.F32, 2, 3), g.external(DType.F32, 2, 4), axis=1)),
        g.node("Transpose", g.external(DType.F32, 3, 7)),
        axis=-1,
    ),
    "rows of a matrix": lambda g: g.node(
        "Slice", g.float32(DType.BF16, 9, 5), g.constant([1]), g.constant([8]), g.constant([0])
    ),
    "columns of a matrix": lambda g: g.node(
        "Slice", g.external(DType.F32, 7, 9), g.constant([3]), g.constant([-1]), g.constant([-1])
    ),
    "a vector times a number": lambda g: g.node("Mul", g.float32(DType.BF16, 7), g.constant(np.float32(0.5))),
    "inline": lambda g: g.weight(7, 5),
    "plus a number": lambda g: g.node("Add", g.float32(DType.BF16, 7), g.constant(np.float32(1))),
    "sum": lambda g: g.node("Add", g.float32(DType.BF16, 7, 5), g.external(DType.F32, 7, 5)),
    "vector": lambda g: g.float32(DType.BF16, 7),
    "vectors": lambda g: g.node("Concat", g.external(DType.F32, 3), g.float32(DType.BF16, 4), axis=0),
    "vector with ones around": lambda g: g.node("Unsqueeze", g.external(DType.F32, 7), g.constant([0, 2])),
}


def test_a_stack_with_a_factor_for_each_matrix(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    weight = g.node("Mul", g.float32(DType.BF16, 3, 4, 5), g.node("Reshape", g.weight(3), g.constant([-1, 1, 1])))
    expected = g.expected(weight, tmp_path).reshape(12, 5)
    tensor = weight_of(g.finish(g.node("Add", g.input(), weight)))
    with WeightReader(checked(tmp_path, "weights.bin")) as reader:
        for begin, end in ((0, 12), (0, 1), (3, 9), (11, 12)):
            np.testing.assert_array_equal(reader.read_rows(tensor, begin, end), expected[begin:end])


def test_columns_of_each_matrix_of_a_stack(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    bounds = [g.constant([each]) for each in (2, 5, 2)]
    weight = g.node("Slice", g.float32(DType.BF16, 3, 4, 6), *bounds)
    expected = g.expected(weight, tmp_path).reshape(12, 3)
    tensor = weight_of(g.finish(g.node("Add", g.input(), weight)))
    with WeightReader(checked(tmp_path, "weights.bin")) as reader:
        for begin, end in ((0, 12), (0, 1), (3, 9), (11, 12)):
            np.testing.assert_array_equal(reader.read_rows(tensor, begin, end), expected[begin:end])


def test_a_slice_with_steps_is_refused(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    bounds = [g.constant([each]) for each in (0, 7, 0, 2)]
    graph = g.finish(g.node("Add", g.input(), g.node("Slice", g.external(DType.F32, 7, 5), *bounds)))
    with pytest.raises(PassError, match="slices a weight in a way"):
        matrix_shape(weight_of(graph))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_block_of_rows(tmp_path: Path, name: str) -> None:
    g = ExternalMaker(tmp_path)
    weight = EXPRESSIONS[name](g)
    expected = g.expected(weight, tmp_path)
    graph = g.finish(g.node("Add", g.input(), weight))
    tensor = weight_of(graph)
    assert matrix_shape(tensor) == (7, expected.size // 7)
    with WeightReader(checked(tmp_path, "weights.bin")) as reader:
        for begin, end in ((0, 7), (0, 1), (2, 5), (6, 7), (3, 3)):
            block = reader.read_rows(tensor, begin, end)
            np.testing.assert_array_equal(block, expected.reshape(7, -1)[begin:end])


def test_equal_values_have_equal_keys(tmp_path: Path) -> None:
    """Two initialisers at one place are one weight; a cast, a transpose or another place makes another."""
    g = ExternalMaker(tmp_path)
    first, other = g.external(DType.F32, 8, 8), g.external(DType.F32, 8, 8)
    twin = onnx.TensorProto()
    twin.CopyFrom(g._initializers[0])
    twin.name = "twin"
    g._initializers.append(twin)
    x = g.input()
    names = [first, "twin", other, g.node("Transpose", first), g.node("Cast", first, to=TensorProto.BFLOAT16)]
    for name in names:
        x = g.node("MatMul", x, name)
    graph = g.finish(x)
    keys = [key(node.inputs[1]) for node in graph.nodes if node.op == "MatMul"]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_stored_types(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    both = g.node("Concat", g.float32(DType.BF16, 3, 5), g.external(DType.F32, 4, 5), axis=0)
    graph = g.finish(g.node("Add", g.input(), g.node("Reshape", both, g.constant([5, 7]))))
    assert list(stored_dtypes(weight_of(graph))) == [(DType.BF16, 30), (DType.F32, 80)]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    graph = g.finish(g.node("Add", g.input(), g.external(DType.F32, 7, 5)))
    checkpoint = checked(tmp_path, "weights.bin")
    (tmp_path / "weights.bin").write_bytes(b"?" * 100)
    with WeightReader(checkpoint) as reader, pytest.raises(CheckpointError, match="truncated"):
        reader.read_rows(weight_of(graph), 0, 7)


@pytest.mark.parametrize("location", ["../weights.bin", "gone.bin", ".", ""])
def test_sources_are_checked_before_anything_is_read(tmp_path: Path, location: str) -> None:
    g = ExternalMaker(tmp_path)
    weight = g.node("Transpose", g.float32(DType.F32, 7, 5))
    graph = g.finish(g.node("Add", g.input(), weight))
    checkpoint = checked(tmp_path, "weights.bin")
    check_sources(weight_of(graph), checkpoint)
    g._initializers[0].external_data[0].value = location
    graph = g.finish(g.node("Add", g.input(), weight))
    with pytest.raises(CheckpointError):
        check_sources(weight_of(graph), checkpoint)


@pytest.mark.parametrize(("dtype", "dims"), [(TensorProto.FLOAT, [1, 5]), (TensorProto.FLOAT16, [7, 5])])
def test_another_shape_or_type_than_was_stored_is_refused(tmp_path: Path, dtype: int, dims: list[int]) -> None:
    g = ExternalMaker(tmp_path)
    weight = g.node("Cast", g.external(DType.F32, 7, 5), to=TensorProto.FLOAT)
    checkpoint = checked(tmp_path, "weights.bin")
    (stored,) = (each for each in g._initializers if each.external_data)
    stored.data_type, stored.dims[:] = dtype, dims
    graph = g.finish(g.node("Add", g.input(), weight))
    with pytest.raises(CheckpointError, match=r"another number of bytes than(.|\n)*got: 140 bytes"):
        check_sources(weight_of(graph), checkpoint)


def test_a_product_of_two_weights(tmp_path: Path) -> None:
    """Near ONNX's, which sums in float32, and the same in every block."""
    g = ExternalMaker(tmp_path)
    transposed = g.node("Transpose", g.external(DType.F32, 5, 6), perm=[1, 0])
    name = g.node("MatMul", g.float32(DType.BF16, 7, 6), transposed)
    expected = g.expected(name, tmp_path)
    weight = weight_of(g.finish(g.node("Add", g.input(), name)))
    assert matrix_shape(weight) == (7, 5)
    with WeightReader(checked(tmp_path, "weights.bin")) as reader:
        whole = reader.read_rows(weight, 0, 7)
        np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(np.concatenate([reader.read_rows(weight, i, i + 1) for i in range(7)]), whole)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    graph = g.finish(g.node("Add", g.input(), g.node("Reshape", g.external(DType.F32, 7, 6), g.constant([6, 7]))))
    with (
        WeightReader(checked(tmp_path, "weights.bin")) as reader,
        pytest.raises(BuildError, match="cannot be evaluated"),
    ):
        reader.read_rows(weight_of(graph), 0, 6)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    g = ExternalMaker(tmp_path)
    graph = g.finish(g.node("Gather", g.constant(np.zeros((11, 8), np.int64)), "ids", axis=0))
    with pytest.raises(BuildError, match="INT64"):
        list(stored_dtypes(graph.logits.inputs[0].inputs[0]))
