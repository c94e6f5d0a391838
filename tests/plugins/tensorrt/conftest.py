"""What tests of TensorRT need: its wheels, or the reason why a test is skipped."""

import pytest

from ingot.plugins.cuda.compiler import find_compiler
from ingot.plugins.tensorrt.library import Library, find_rtx


@pytest.fixture
def library() -> Library:
    """TensorRT-RTX as installed."""
    found = find_rtx()
    if isinstance(found, str):
        pytest.skip("this machine lacks TensorRT-RTX (pip install 'ingot[tensorrt-rtx]')")
    return found


@pytest.fixture
def builder(library: Library) -> Library:
    """TensorRT-RTX and a CUDA compiler beside it: whole engines."""
    if find_compiler() is None:
        pytest.skip("this machine lacks nvcc (pip install nvidia-cuda-nvcc)")
    return library
