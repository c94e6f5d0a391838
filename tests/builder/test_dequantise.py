"""Weights of codes and scales give the values of their formula, in any block of rows; what cannot be is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from ingot.builder.dequantise import numbers, stored_as
from ingot.builder.expressions import WeightReader, matrix_shape, stored_dtypes
from ingot.dtypes import DType
from ingot.errors import BuildError
from tests.handmade import checked
from tests.passes.graphs import GraphMaker

RANDOM = np.random.default_rng(3)
CODES = RANDOM.integers(0, 16, (7, 10)).astype(np.uint8)
ZEROS = RANDOM.integers(0, 16, (7, 3)).astype(np.uint8)
SCALES = RANDOM.uniform(0.5, 1.5, (7, 3)).astype(np.float32)
TABLE = RANDOM.uniform(-1, 1, 16).astype(np.float32)
ORDER = RANDOM.permutation(10)
OWNER = np.arange(10) // 4  # two groups of 4 and one of 2
Float32 = npt.NDArray[np.float32]
Make = Callable[[GraphMaker], str]


def blocks(g: GraphMaker) -> str:
    inputs = [g.constant(each) for each in (CODES, SCALES, ZEROS)]
    return g.node("DequantizeLinear", *inputs, axis=1, block_size=4)


def table(g: GraphMaker) -> str:
    indices = g.node("Cast", g.constant(CODES), to=TensorProto.INT32)
    values = g.node("Reshape", g.node("Gather", g.constant(TABLE), indices, axis=0), g.constant([0, 2, 5]))
    scales = g.node("Unsqueeze", g.constant(SCALES[:, :2]), g.constant([-1]))
    return g.node("Reshape", g.node("Mul", values, scales), g.constant([0, 10]))


BLOCKS = (CODES.astype(np.float32) - ZEROS[:, OWNER]) * SCALES[:, OWNER]
CASES: dict[str, tuple[Make, Float32]] = {
    "blocks": (blocks, BLOCKS),
    "table": (table, TABLE[CODES] * SCALES[:, :2].repeat(5, 1)),
    "order": (lambda g: g.node("Gather", blocks(g), g.constant(ORDER), axis=1), BLOCKS[:, ORDER]),
    "rows divided": (lambda g: g.node("Div", blocks(g), g.constant(SCALES[:, :1])), BLOCKS / SCALES[:, :1]),
    "columns": (lambda g: g.node("Mul", blocks(g), g.constant(TABLE[:10])), BLOCKS * TABLE[:10]),
    "transposed": (lambda g: g.node("Transpose", blocks(g), perm=[1, 0]), BLOCKS.T),
    "beside another": (
        lambda g: g.node("Concat", blocks(g), table(g), axis=0),
        np.concatenate([BLOCKS, TABLE[CODES] * SCALES[:, :2].repeat(5, 1)]),
    ),
    "stack": (lambda g: g.node("Reshape", blocks(g), g.constant([7, 1, 10])), BLOCKS),
}


@pytest.mark.parametrize("name", CASES)
def test_every_block_of_rows(tmp_path: Path, name: str) -> None:
    make, expected = CASES[name]
    (tmp_path / "weights.bin").write_bytes(b"?")
    g = GraphMaker()
    tensor = g.finish(g.node("Add", g.input(), make(g))).logits.inputs[0].inputs[1]
    rows = len(expected)
    assert matrix_shape(tensor) == expected.shape
    assert {dtype for dtype, _ in stored_dtypes(tensor)} == {DType.W8}
    with WeightReader(checked(tmp_path, "weights.bin")) as reader:
        for begin, end in ((0, rows), (0, 1), (2, 5), (rows - 1, rows)):
            np.testing.assert_array_equal(reader.read_rows(tensor, begin, end), expected[begin:end])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda g: g.node("DequantizeLinear", g.constant(CODES), g.constant(SCALES), axis=1, block_size=2),
            r"do not fit(.|\n)*\[3, 5\]",
        ),
        (
            lambda g: g.node("DequantizeLinear", g.constant(CODES), g.constant(SCALES[0]), axis=0),
            "DequantizeLinear of a weight has a form",
        ),
        (
            lambda g: g.node("Gather", g.constant(TABLE[:3]), g.constant(CODES), axis=0),
            r"point outside its table of 3 values(.|\n)*expected: -3 to 2(.|\n)*got: -?\d to \d(.|\n)*convert",
        ),
        (
            lambda g: g.node("Gather", blocks(g), g.constant(ORDER[:3]), axis=0),
            "must look up codes in a table, or reorder columns",
        ),
        (lambda g: g.node("Cast", blocks(g), to=TensorProto.DOUBLE), "does not compute with"),
    ],
)
def test_what_cannot_be_evaluated(tmp_path: Path, make: Make, words: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"?")
    g = GraphMaker()
    tensor = g.finish(g.node("Add", g.input(), make(g))).logits.inputs[0].inputs[1]
    with WeightReader(checked(tmp_path, "weights.bin")) as reader, pytest.raises(BuildError, match=words):
        reader.read_rows(tensor, 0, 3)


def test_codes_of_four_bits_lie_two_to_a_byte() -> None:
    stored = np.array([[0x21, 0xF8]], np.uint8)
    assert numbers(stored, TensorProto.UINT4).tolist() == [[1, 2, 8, 15]]
    assert numbers(stored, TensorProto.INT4).tolist() == [[1, 2, -8, -1]]
    assert stored_as(TensorProto.INT4, (3, 8)) == (DType.U8, (3, 4))
    assert stored_as(TensorProto.INT4, (3, 7)) is None
    assert stored_as(TensorProto.FLOAT8E4M3FN, (3, 7)) == (DType.F8, (3, 7))
