"""Published figures and their estimates: stages add up to the model, runs begin and end, errors stay small."""

import dataclasses
import statistics
from collections import defaultdict

import pytest

from tests.programs.plan_accuracy import fitted
from tests.programs.published_points import M70, M405, Point, devices, points, stage_costs, throughput

# What `plan_accuracy --published` fits on one and four stages of an RTX 6000, in the order of FITTED.
FITTED_ON_STAGES = (0.921, 0.654, 190e-6, 60e-6)


def test_stages_are_the_whole_model() -> None:
    (whole,) = stage_costs(M405, "fp4", 1, 1)
    stages = stage_costs(M405, "fp4", 1, 8)
    assert [each.layers for each in stages] == [16] * 6 + [15] * 2
    for name in ("weights", "head", "row_operations", "logit_operations", "resident"):
        assert sum(getattr(each, name) for each in stages) == pytest.approx(getattr(whole, name))
    assert sum(each.sequence_bytes(10) for each in stages) == pytest.approx(whole.sequence_bytes(10))
    assert [each.head > 0 for each in stages] == [each.draws for each in stages] == [False] * 7 + [True]
    assert [each.messages for each in stages] == [1] * 7 + [0]


def test_a_run_has_a_begin_and_an_end() -> None:
    """Memory helps until all requests run at once; few at once are in few of the stages."""
    point = Point(kind="", shape=M70, device="", arithmetic="fp4", given=1000, new=2000, found=0, pp=8)
    device = devices()["rtx6000"]
    speeds = [
        throughput(point, dataclasses.replace(device, memory=size * 1e9)) for size in (12, 16, 24, 48, 96, 5e3, 1e4)
    ]
    assert speeds == sorted(speeds), "more memory is never slower"
    assert speeds[-2] == speeds[-1], "there are no more requests"
    faster = throughput(point, dataclasses.replace(device, bandwidth=2 * device.bandwidth))
    assert speeds[-3] < faster < 2 * speeds[-3]
    few = [throughput(dataclasses.replace(point, batch=batch), device) for batch in (1, 2, 8, 64)]
    assert 1.7 < few[1] / few[0] <= 2, "a request alone is in one of eight stages at a time"
    assert few == sorted(few)


@pytest.mark.slow
def test_errors_of_stages_that_nothing_was_fitted_to() -> None:
    errors = defaultdict[str, list[float]](list)
    for point in points():
        if point.device == "rtx6000" and point.pp > 1:
            found = throughput(point, fitted(devices()[point.device], FITTED_ON_STAGES))
            errors[point.kind].append(abs(found / point.found - 1))
    medians = {kind: statistics.median(each) for kind, each in errors.items()}
    assert len(medians) == 4
    assert max(medians.values()) < 0.1
    assert max(max(each) for each in errors.values()) < 0.25
