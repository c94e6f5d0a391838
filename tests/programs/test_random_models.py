"""Random models that are hard to judge: one that repeats itself, and one whose tokens take other experts."""

from pathlib import Path

import pytest

from tests.programs.random_models import report


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("bloom", 5), ("gpt_oss", 3)])
def test_every_check_of_a_random_model_holds(
    name: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = report(name, seed, tmp_path)
    assert not failed, capsys.readouterr().out
