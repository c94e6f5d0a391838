"""The odds of drafts: learned by the length of the match, of each request and of all."""

import pytest

from ingot.runtime.drafts.odds import MOST_MATCHED, Odds


def test_gains_multiply() -> None:
    odds = Odds()
    first, second, third = odds.gains(2, 3)
    assert (first, second, third) == pytest.approx(
        (odds.right(2), odds.right(2) * odds.right(3), odds.right(2) * odds.right(3) * odds.right(4))
    )
    assert 1 > first > second > third > 0


@pytest.mark.parametrize("share", [0, 1])
def test_what_is_always_right_or_wrong_is_learned(share: int) -> None:
    odds = Odds()
    for _ in range(50):
        odds.learn(2, 1, share)
    assert odds.right(2) == pytest.approx(share, abs=0.05)
    assert odds.right(3) == Odds().right(3), "a match of another length tells nothing"


def test_drafts_behind_a_wrong_one_tell_nothing() -> None:
    odds = Odds()
    odds.learn(2, 7, 2)
    fresh = Odds()
    assert odds.right(2) > fresh.right(2)
    assert odds.right(3) > fresh.right(3)
    assert odds.right(4) < fresh.right(4)
    assert [odds.right(n) for n in (5, 6, 7, 8)] == [fresh.right(n) for n in (5, 6, 7, 8)]


def test_a_new_request_begins_with_the_odds_of_all_and_leaves_them_for_its_own() -> None:
    common = Odds()
    for _ in range(50):
        Odds(common).learn(2, 1, 1)
    request = Odds(common)
    assert request.right(2) == common.right(2) > 0.9
    for _ in range(30):
        request.learn(2, 1, 0)
    assert request.right(2) < 0.1


def test_what_is_not_tried_is_forgotten_slowly() -> None:
    odds = Odds(Odds())
    for _ in range(30):
        odds.learn(2, 1, 0)
    low = odds.right(2)
    odds.rest(2)
    assert low < odds.right(2) < 0.05
    for _ in range(4000):
        odds.rest(2)
    assert odds.right(2) == pytest.approx(Odds().right(2), abs=0.01)


def test_long_matches_count_as_one_length() -> None:
    odds = Odds()
    odds.learn(MOST_MATCHED + 5, 3, 3)
    assert odds.right(MOST_MATCHED) == odds.right(MOST_MATCHED + 40) > Odds().right(MOST_MATCHED)
