"""The program that tells how far estimates are off: what it fits, and its table of an engine."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ingot.runtime.reports import StepReport
from tests.e2e.conftest import shipped_checkpoint as shipped_checkpoint
from tests.e2e.conftest import shipped_engine as shipped_engine
from tests.programs import plan_accuracy
from tests.programs.plan_accuracy import FITTED_ON, engine, fit, loads, step_log


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


def test_measured_steps_are_laid_beside_simulated_ones() -> None:
    """Each step of a call has its share of the call, and a step that the simulation does not have is an error."""

    def report(steps: int, prompt: int, rows: int, seconds: float) -> StepReport:
        return StepReport(
            steps=steps,
            prefill_tokens=prompt,
            decode_rows=rows,
            schedule_seconds=0.1,
            session_seconds=seconds,
            finish_seconds=0.2,
        )

    simulated = [(np.array([past] * 2), np.array([new] * 2), 2) for past, new in ((0, 4), (4, 1), (5, 1))]
    rounds = [[report(1, 8, 0, each), report(2, 0, 2, 2 * each)] for each in (1.0, 5.0, 3.0)]
    log = step_log(rounds, simulated, {0})
    assert log.seconds.tolist() == pytest.approx([3.3, 6.3, 6.3])
    assert log.calls.tolist() == [1, 0.5, 0.5]
    assert [load.rows for load in log.loads] == [8, 2, 2]
    with pytest.raises(ValueError, match="other steps"):
        step_log([rounds[0][:1]], simulated, {0})


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
