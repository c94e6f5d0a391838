"""The language of weight tables against numpy, and the claim that nothing is missing or left over."""

from pathlib import Path

import numpy as np
import pytest

from ingot.convert.claim import claim
from ingot.convert.weights import (
    Concat,
    Drop,
    Expr,
    Filling,
    FirstRow,
    KeyGroups,
    OneOf,
    PerExpert,
    Regroup,
    Row,
    Skip,
    Split,
    Stack,
    Take,
    Transpose,
    Unpair,
    blocks,
    filled,
    held,
    infer,
    sources,
)
from ingot.dtypes import DType
from ingot.errors import CheckpointError
from ingot.tensor_file import StoredTensor, read_header
from tests.handmade import write_safetensors

A = np.arange(12, dtype=np.float32).reshape(4, 3)
B = np.arange(100, 106, dtype=np.float32).reshape(2, 3)
AB = np.concatenate([A, B])
H = np.arange(6, dtype=np.float16).reshape(2, 3)


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, StoredTensor]:
    write_safetensors(
        tmp_path / "x.safetensors", {"a": (DType.F32, A), "b": (DType.F32, B), "h": (DType.F16, H)}, padding=1
    )
    return read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (Take("a"), A),
        (Transpose(Take("a")), A.T),
        (Concat((Take("a"), Take("b"))), np.concatenate([A, B])),
        (Concat((Transpose(Take("a")), Transpose(Take("b"))), axis=1), np.concatenate([A.T, B.T], axis=1)),
        (Stack((Take("b"), Take("b"))), np.stack([B, B])),
        (Split(Take("a"), parts=2, index=1), A[2:]),
        (Split(Take("a"), parts=3, index=0, axis=1), A[:, :1]),
        (Regroup(Take("a"), parts=2, heads=2), A[[0, 2, 1, 3]]),
        (Regroup(Concat((Take("a"), Take("a"))), parts=2, heads=4), np.concatenate([A, A])[[0, 2, 4, 6, 1, 3, 5, 7]]),
        (Transpose(Regroup(Take("a"), parts=2, heads=1)), A.T),
        (KeyGroups(Take("a"), (), take=(1,), groups=1, sizes=(1, 3)), A[1:]),
        (KeyGroups(Concat((Take("a"), Take("b"))), (), take=(1, 0), groups=2, sizes=(1, 2)), AB[[1, 2, 4, 5, 0, 3]]),
        (Skip(Take("a"), 1), A[1:]),
        (Unpair(Take("a"), heads=1), A[[0, 2, 1, 3]]),
        (Unpair(Take("a"), heads=2), A),
        (FirstRow(Split(Take("a"), parts=4, index=0)), A[0]),
        (Unpair(Stack((Take("a"), Take("a"))), heads=2), np.stack([A[[0, 2, 1, 3]]] * 2)),
        (
            Stack((Concat((Take("a"), Take("b"))), Concat((Take("b"), Take("a"))))),
            np.stack([np.concatenate([A, B]), np.concatenate([B, A])]),
        ),
        (Transpose(Split(Concat((Take("a"), Take("b"))), parts=3, index=2)), B.T),
    ],
)
def test_expressions(tensors: dict[str, StoredTensor], expr: Expr, expected: np.ndarray) -> None:
    assert infer(expr, tensors) == (DType.F32, expected.shape)
    made = list(blocks(expr, tensors, 5))
    np.testing.assert_array_equal(np.concatenate(made).reshape(expected.shape), expected)
    assert max(each.size for each in made) <= max(5, held(expr, tensors))


def test_what_streams_is_not_held(tensors: dict[str, StoredTensor]) -> None:
    both = Concat((Take("a"), Take("b")))
    assert held(Stack((both, both)), tensors) == 0
    assert held(Stack((Transpose(Take("a")), Transpose(Take("a")))), tensors) == A.size
    assert held(Concat((Take("a"), Take("b")), axis=1), tensors | {"b": tensors["a"]}) == 2 * A.size


def test_tables_are_filled_in() -> None:
    experts = PerExpert(Concat((Take("e{e}.x"), Take("e{e}.y"))))
    table = OneOf((experts, Take("all")))
    written = Stack((Concat((Take("e0.x"), Take("e0.y"))), Concat((Take("e1.x"), Take("e1.y")))))
    for names, expected in ((["e0.x"], written), (["all"], Take("all")), ([], written)):
        assert filled(table, Filling(heads=1, experts=2, names=names)) == expected
    heads = filled(Transpose(Regroup(Take("a"), parts=3)), Filling(heads=7, experts=0, names=()))
    assert heads == Transpose(Regroup(Take("a"), parts=3, heads=7))


def test_a_take_comes_in_blocks(tensors: dict[str, StoredTensor]) -> None:
    assert [len(block) for block in blocks(Take("a"), tensors, 5)] == [5, 5, 2]


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        (Concat((Take("b"), Take("h"))), r"f32 \[2, 3\], f16 \[2, 3\]"),
        (Concat((Take("a"), Take("b")), axis=1), r"f32 \[4, 3\], f32 \[2, 3\]"),
        (Stack((Take("a"), Take("b"))), r"where: a, b"),
        (Split(Take("a"), parts=3, index=0), "axis 0 divisible by 3"),
        (Regroup(Take("a"), parts=3, heads=2), "rows divisible by 3 x 2"),
        (Skip(Take("a"), 4), "more than 4 rows"),
        (Unpair(Take("a"), heads=3), "rows divisible by 2 x 3"),
        (KeyGroups(Take("a"), (), take=(0,), groups=2, sizes=(1, 2)), r"2 groups of 1 \+ 2 rows"),
        (FirstRow(Take("a")), "one row"),
    ],
)
def test_parts_that_do_not_fit(tensors: dict[str, StoredTensor], expr: Expr, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"do not fit together(.|\n)*{words}"):
        infer(expr, tensors)


def test_sources() -> None:
    assert sources(Concat((Take("a"), Transpose(Split(Take("b"), parts=2, index=0))))) == ("a", "b")


ROWS = [Row("one", Take("a")), Row("two", Take("b")), Row("unwanted", Take("h"))]


def test_a_complete_claim(tensors: dict[str, StoredTensor]) -> None:
    assert claim(ROWS, [Drop("h"), Drop("absent")], tensors, {"one": (4, 3), "two": (2, 3)}) == ROWS[:2]


def test_missing_and_unclaimed_stop_with_both_lists(tensors: dict[str, StoredTensor]) -> None:
    rows = [Row("one", Take("gone")), Row("two", Take("b"))]
    with pytest.raises(
        CheckpointError, match=r"1 that the files lack: gone(.|\n)*2 that config.json does not ask for: a, h"
    ):
        claim(rows, [], tensors, {"one": (4, 3), "two": (2, 3)})


def test_a_tensor_too_few_or_too_many_is_enough_to_stop(tensors: dict[str, StoredTensor]) -> None:
    wanted = {"one": (4, 3), "two": (2, 3)}
    with pytest.raises(
        CheckpointError, match=r"1 that the files lack: gone(.|\n)*0 that config.json does not ask for: none"
    ):
        claim([Row("one", Take("gone")), ROWS[1]], [Drop("a"), Drop("h")], tensors, wanted)
    with pytest.raises(
        CheckpointError, match=r"0 that the files lack: none(.|\n)*1 that config.json does not ask for: h"
    ):
        claim(ROWS, [], tensors, wanted)


def test_long_lists_are_cut(tensors: dict[str, StoredTensor]) -> None:
    rows = [Row(f"w{i}", Take(f"gone{i:02}")) for i in range(30)]
    with pytest.raises(CheckpointError, match=r"30 that the files lack: gone00, .*gone19 and 10 more"):
        claim(rows, [], tensors, {row.name: (1,) for row in rows})


def test_misshapen_weights_are_listed(tensors: dict[str, StoredTensor]) -> None:
    with pytest.raises(CheckpointError, match=r"got: a: expected \[3, 4\], got \[4, 3\]"):
        claim(ROWS, [Drop("h")], tensors, {"one": (3, 4), "two": (2, 3)})


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"a": (DType.I64, np.arange(3))})
    with pytest.raises(CheckpointError, match=r"type I64 are not supported(.|\n)*where: a"):
        claim(ROWS, [], read_header(tmp_path / "x"), {"one": (3,)})
