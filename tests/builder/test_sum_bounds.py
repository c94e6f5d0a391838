"""Where sums are cut: whole heads, whole groups, and no rank with key heads that it hardly uses."""

import itertools

import pytest

from ingot.builder.sum_bounds import Whole, part_bounds

DIM = 16


@pytest.mark.parametrize(
    ("key_heads", "queries", "parts", "group", "ends"),
    [
        (4, 2, 2, 0, [4, 8]),
        (3, 3, 2, 0, [6, 9]),  # whole key heads, and no five query heads of two
        (10, 4, 4, 0, [12, 20, 32, 40]),
        (3, 3, 4, 0, [2, 3, 6, 9]),  # shares of the first
        (3, 2, 4, 0, [1, 2, 4, 6]),
        (2, 7, 8, 0, [2, 4, 6, 7, 9, 11, 13, 14]),
        (1, 4, 4, 0, [1, 2, 3, 4]),
        (4, 3, 2, 32, [6, 12]),  # two key heads fill groups of two heads
        (2, 7, 2, 32, [8, 14]),  # no key head does: groups come first
        (3, 6, 4, 32, [4, 6, 12, 18]),
    ],
)
def test_query_heads_of_parts(key_heads: int, queries: int, parts: int, group: int, ends: list[int]) -> None:
    k, whole = key_heads * queries * DIM, Whole(unit=DIM, shared=queries * DIM)
    bounds = part_bounds("out", k, parts, whole, group)
    assert [end // DIM for _, end in bounds] == ends
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]


def test_all_parts_have_columns_and_cut_nothing() -> None:
    for key_heads, queries, parts, group in itertools.product(range(1, 9), range(1, 9), (2, 4, 8), (0, 16, 32, 64)):
        k, size = key_heads * queries * DIM, max(DIM, group)
        if -(-k // size) < parts:
            continue
        bounds = part_bounds("out", k, parts, Whole(unit=DIM, shared=queries * DIM), group)
        assert len(bounds) == parts
        assert (bounds[0][0], bounds[-1][1]) == (0, k)
        assert all(begin < end and begin % size == 0 for begin, end in bounds)
        assert all(first[1] == second[0] for first, second in itertools.pairwise(bounds))
