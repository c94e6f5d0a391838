"""No test may hang the suite, and hypothesis may not shrink for minutes."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.conftest import REPOSITORY

HANGS = """
import threading
import pytest

def test_waits_for_a_notify_that_nobody_sends():
    condition = threading.Condition()
    with condition:
        condition.wait()
"""


@pytest.mark.slow
def test_a_test_that_waits_for_ever_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    limited = ["-c", f"{REPOSITORY}/pyproject.toml", "--rootdir", f"{tmp_path}", "--timeout", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *limited, "-p", "no:cacheprovider", f"{tmp_path}/test_hangs.py"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode != 0
    assert "Timeout" in done.stdout + done.stderr
    assert "condition.wait()" in done.stdout + done.stderr, "where it waited is told"


def test_every_test_has_a_limit_that_native_code_cannot_hold_up(request: pytest.FixtureRequest) -> None:
    config = request.config
    assert float(config.getini("timeout")) <= 300
    assert config.getini("timeout_method") == "thread"
    assert config.getini("faulthandler_exit_on_timeout")
    assert float(config.getini("faulthandler_timeout")) > 1800, "beyond what slow tests may take"


def test_hypothesis_tells_what_it_finds_as_it_finds_it() -> None:
    current = hypothesis.settings()
    assert current.deadline is None
    assert hypothesis.Phase.shrink not in current.phases
    assert hypothesis.Phase.generate in current.phases
