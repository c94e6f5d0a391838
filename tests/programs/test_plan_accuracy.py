"""The program that tells how far estimates are off: what it fits, and its table of an engine."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import shipped_checkpoint as shipped_checkpoint
from tests.e2e.conftest import shipped_engine as shipped_engine
from tests.programs import plan_accuracy
from tests.programs.plan_accuracy import FITTED_ON, engine, fit, loads


def test_numbers_are_fitted_that_are_right_only_together() -> None:
    """The error of each number alone is least where it begins: only both together lead on."""

    def error(numbers: Sequence[float]) -> float:
        first, second, *rest = (math.log(each) for each in numbers)
        return 100 * abs(first - second) + abs(first + second - 3) + sum(map(abs, rest))

    found = fit(error, [1.0, 1.0, 3.0, 0.2])
    assert found == pytest.approx([math.exp(1.5), math.exp(1.5), 1, 1], rel=0.02)


def test_shares_stay_below_what_they_are_of() -> None:
    found = fit(lambda numbers: sum(abs(each - 2) for each in numbers), [0.8, 0.6, 1.0, 1.0], most_shares=1.0)
    assert found == pytest.approx([1, 1, 2, 2], rel=0.03)
    assert max(found[:2]) <= 1


@pytest.mark.slow
@pytest.mark.native
def test_the_table_of_an_engine(
    shipped_engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All loads, each with the time that was measured; no time is asserted. The fit takes long, and is left out."""
    monkeypatch.setattr(plan_accuracy, "fit", lambda error, start: start)
    engine(shipped_engine, 1)
    _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [
        f"{name}, fitted on" if name in FITTED_ON else name for name in loads()
    ]
    assert all(row.endswith("% |") for row in rows)
