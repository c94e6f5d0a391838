"""Native sessions used by several threads, by signal handlers and forked children: nothing hangs or crashes."""

import os
import subprocess
import sys

import pytest

from tests.house.project import ROOT
from tests.plugins.cpu.concurrent_use import USES, open_small

pytestmark = pytest.mark.native


@pytest.mark.daily(1)
@pytest.mark.parametrize("use", USES)
def test_it_neither_hangs_nor_crashes(use: str) -> None:
    paths = [str(ROOT), *(os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.plugins.cpu.concurrent_use", use]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_hooks_of_a_closed_session() -> None:
    """What tells of the last run goes on doing so; no taps can be lifted from what is not there, but taken away."""
    native = open_small(1).native
    native.close()
    native.tap([])
    assert (native.items_taken(), native.step_seconds(), native.barriers) == ([0], [], 0)
    for use in (lambda: native.tap(["step"]), lambda: native.read_kv(0, 0, False), lambda: native.fill_kv(0.0)):
        with pytest.raises(ValueError, match="closed"):
            use()
