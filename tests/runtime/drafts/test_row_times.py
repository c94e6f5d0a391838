"""Times of steps by rows: learned from steps, and guessed between them, forgotten after a while."""

import pytest

from ingot.runtime.drafts.row_times import RowTimes


def times_of(seen: dict[int, float]) -> RowTimes:
    times = RowTimes()
    for rows, seconds in seen.items():
        times.observe(rows, seconds)
    return times


def test_nothing_is_known_before_a_step_of_so_few_rows() -> None:
    assert not RowTimes().knows(5)
    assert [times_of({3: 1.0}).knows(rows) for rows in (2, 3, 4)] == [False, True, True]


def test_between_the_rows_that_were_seen_times_lie_below_the_line() -> None:
    times = times_of({2: 1.0, 6: 5.0})
    assert [times.predict(rows) for rows in (2, 3, 4, 5, 6)] == [1.0, 1.25, 2.0, 3.25, 5.0]


def test_beyond_them_few_rows_are_expected_to_cost_nothing_and_many_half_of_what_they_may() -> None:
    times = times_of({2: 1.0})
    assert [times.predict(rows) for rows in (1, 4, 8, 16, 80)] == [1.0, 1.0, 1.0, 1.5, 5.5]
    assert times_of({16: 2.0}).predict(32) == 3.0
    assert times_of({16: 3.0}).predict(4) == 2.0


def test_a_try_has_no_more_than_twice_the_rows_that_were_seen() -> None:
    assert [times_of(seen).most_rows for seen in ({1: 1.0}, {3: 1.0, 20: 2.0})] == [16, 40]


def test_a_step_moves_what_is_known_and_an_outlier_does_little() -> None:
    times = times_of({4: 1.0})
    times.observe(4, 1e6)
    assert times.predict(4) == pytest.approx(1.2)
    for _ in range(100):
        times.observe(4, 3.0)
    assert times.predict(4) == pytest.approx(3.0)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    times = times_of({8: 9.0})
    for _ in range(600):
        times.observe(1, 1.0)
    assert times.predict(8) == 1.0
