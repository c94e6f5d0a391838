"""Drafts from a request's own tokens: the latest of the longest matches, and on into themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime.drafts.lookup import lookup


def plainly(tokens: list[int], shortest: int, longest: int, most: int) -> tuple[list[int], int]:
    """The same, place by place."""
    for matched in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        head = tokens[len(tokens) - matched :]
        for end in range(len(tokens) - 1, matched - 1, -1):
            if tokens[end - matched : end] == head:
                drafts = list(tokens)
                for _ in range(most):
                    drafts.append(drafts[len(drafts) - (len(tokens) - end)])
                return drafts[len(tokens) :], matched
    return [], 0


def looked_up(tokens: list[int], shortest: int, longest: int, most: int) -> tuple[list[int], int]:
    drafts, matched = lookup(np.array(tokens, np.int32), shortest, longest, most)
    return drafts.tolist(), matched


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    most=st.integers(1, 9),
)
def test_equals_the_search_place_by_place(tokens: list[int], lengths: list[int], most: int) -> None:
    shortest, longest = lengths
    assert looked_up(tokens, shortest, longest, most) == plainly(tokens, shortest, longest, most)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], ([4, 5, 1, 2, 3, 4], 3)),  # the third of them is what came last
        ([1, 2, 8, 1, 2, 9, 1, 2], ([9, 1, 2, 9, 1, 2], 2)),  # the latest of two
        ([3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2], ([8, 4, 1, 2, 9, 3], 3)),  # the longer of two
        ([7, 7, 7], ([7, 7, 7, 7, 7, 7], 2)),
        ([1, 2, 3, 4], ([], 0)),
        ([1, 2, 3, 4, 2], ([], 0)),  # a single token is too few
        ([5], ([], 0)),
    ],
)
def test_drafts_are_what_came_after_the_last_tokens(tokens: list[int], expected: tuple[list[int], int]) -> None:
    assert looked_up(tokens, 2, 4, 6) == expected


def test_no_draft_where_there_is_room_for_none() -> None:
    assert looked_up([1, 2, 3, 1, 2], 2, 4, 0) == ([], 0)
