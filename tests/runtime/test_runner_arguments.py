"""What `ModelRunner.generate` is asked reaches its requests and its results."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from ingot.errors import RequestError, UsageError
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import Request
from tests.runtime.tiny_engine import make_runner, ref_session
from tests.runtime.tiny_plan import make_model


@pytest.fixture
def runner() -> ModelRunner:
    model = make_model()
    return make_runner(model, ref_session(model, 20))


@pytest.mark.parametrize(("pad_id", "expected"), [(None, 9), (0, 0), (-1, -1), (3, 3)])
def test_rows_are_filled_up_with_what_was_said(runner: ModelRunner, pad_id: int | None, expected: int) -> None:
    runner.model_info = dataclasses.replace(runner.model_info, pad_id=9)
    ids = runner.generate([[1, 2, 3], [4]], max_new_tokens=2, end_id=-1, pad_id=pad_id)
    assert ids[1, 0, 3:].tolist() == [expected] * 2


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, (0, False)),
        ({"priority": -3}, (-3, False)),
        ({"output_log_probs": True}, (0, True)),
        ({"output_cum_log_probs": True}, (0, True)),
    ],
)
def test_requests_are_as_they_were_asked(
    runner: ModelRunner, said: dict[str, Any], wanted: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Request] = []
    add = runner.executor.add

    def watched(requests: Sequence[Request], outlet: Outlet) -> None:
        seen.extend(requests)
        add(requests, outlet)

    monkeypatch.setattr(runner.executor, "add", watched)
    runner.generate([[1, 2]], max_new_tokens=1, return_dict=True, **said)
    assert [(request.priority, request.want_log_probs) for request in seen] == [wanted]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"random_seed": -1}, "random_seed must be a whole number"),
        ({"random_seed": [3, 2**64]}, "random_seed must be a whole number"),
        ({"min_length": 3, "max_new_tokens": 2}, "min_length is more than max_new_tokens"),
    ],
)
def test_refusals_have_the_names_of_the_call(runner: ModelRunner, said: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        runner.generate([[1, 2], [3]], **said)


@pytest.mark.parametrize("name", [None, 3, b"engine", ["engine"]])
def test_engine_directories_are_paths(name: Any) -> None:
    with pytest.raises(UsageError, match="engine_dir must be a path"):
        ModelRunner.from_dir(name)
