"""Times of steps by rows: learned from steps, along a line between them, forgotten after a while."""

import pytest

from ingot.runtime.drafts.pace import Pace


def paced(times: dict[int, float]) -> Pace:
    pace = Pace()
    for rows, seconds in times.items():
        pace.observe(rows, seconds)
    return pace


def test_nothing_is_known_before_a_step_of_so_few_rows() -> None:
    assert not Pace().knows(5)
    assert [paced({3: 1.0}).knows(rows) for rows in (2, 3, 4)] == [False, True, True]


def test_between_the_rows_that_were_seen_times_lie_on_a_line() -> None:
    pace = paced({2: 1.0, 6: 3.0})
    assert [pace.predict(rows) for rows in (2, 3, 4, 6)] == [1.0, 1.5, 2.0, 3.0]


def test_beyond_them_few_rows_are_expected_to_cost_nothing_and_many_in_proportion() -> None:
    pace = paced({2: 1.0})
    assert [pace.predict(rows) for rows in (1, 4, 8, 16, 80)] == [1.0, 1.0, 1.0, 2.0, 10.0]
    assert paced({16: 2.0}).predict(32) == 4.0
    assert paced({16: 2.0}).predict(4) == 1.0


def test_a_step_moves_what_is_known_and_an_outlier_does_little() -> None:
    pace = paced({4: 1.0})
    pace.observe(4, 1e6)
    assert pace.predict(4) == pytest.approx(1.2)
    for _ in range(100):
        pace.observe(4, 3.0)
    assert pace.predict(4) == pytest.approx(3.0)


def test_what_was_seen_long_ago_is_forgotten() -> None:
    pace = paced({8: 9.0})
    for _ in range(600):
        pace.observe(1, 1.0)
    assert pace.predict(8) == 1.0
