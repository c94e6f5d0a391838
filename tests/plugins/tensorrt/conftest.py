"""What tests of TensorRT need: its wheels, or the reason why a test is skipped."""

import pytest

from ingot.plugins.tensorrt.library import Library, find_rtx


@pytest.fixture
def library() -> Library:
    """TensorRT-RTX as installed."""
    found = find_rtx()
    if isinstance(found, str):
        pytest.skip("this machine lacks TensorRT-RTX (pip install 'ingot[tensorrt-rtx]')")
    return found
