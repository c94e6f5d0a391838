"""Kernels that go through the interpreter."""

import ctypes

import pytest

from ingot.plugins.cuda.compiler import Compiler, find_compiler
from tests.plugins.cuda import one_step
from tests.plugins.cuda.ptx.launches import Interpreted


@pytest.fixture
def nvcc() -> Compiler:
    """The real one: asked for before the emulated GPU's stands in its place."""
    found = find_compiler()
    if found is None:
        pytest.skip("this machine lacks nvcc (pip install nvidia-cuda-nvcc)")
    return found


@pytest.fixture
def interpreted(nvcc: Compiler, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    """Every launch of a session while the test runs; once, since the order of threads makes no difference to it."""
    monkeypatch.setattr(one_step, "ORDERS", (0,))
    return Interpreted(nvcc, gpu, monkeypatch)
