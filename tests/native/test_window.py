"""The window of ranks, with ranks as threads of one process: whom they name when one of them stands still, and bytes
that move between the first rank and the others."""

import platform
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.house.project import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def selftest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("this machine lacks a C++ compiler for x86-64")
    folder = tmp_path_factory.mktemp("window")
    includes = [f"-I{ROOT / 'plugins' / each}" for each in ("cpu", "include")]
    compiler = ["g++", "-std=c++20", "-O1", "-pthread", *includes]
    window, program = folder / "window.o", folder / "window_selftest"
    mapped = ["-Dmmap=window_mmap", "-Dmunmap=window_munmap", "-c", str(ROOT / "plugins/cpu/ranks/window.cpp")]
    subprocess.run([*compiler, *mapped, "-o", str(window)], check=True, timeout=200)
    source = str(ROOT / "tests/native/window_selftest.cpp")
    subprocess.run([*compiler, source, str(window), "-o", str(program)], check=True, timeout=200)
    return program


@pytest.mark.parametrize("what", ["late", "moves", "fails", "2 2 2 300"])
def test_what_ranks_do_for_each_other(what: str, selftest: Path) -> None:
    done = subprocess.run([selftest, *what.split()], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


def test_a_pause_of_all_ranks_is_nobodys_fault(selftest: Path) -> None:
    """As of a machine that is suspended, or a container that is frozen: longer than the timeout, while ranks wait."""
    with subprocess.Popen([selftest, "late"], stdout=subprocess.PIPE, text=True) as process:
        time.sleep(0.7)  # the late rank takes 1.5 s, in calls of 0.15 s; the timeout is 0.5 s
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        told, _ = process.communicate(timeout=100)
    assert process.returncode == 0, told
