"""What tests of TensorRT need: its wheels, or the reason why a test is skipped; and the emulated GPU."""

import pytest

from ingot.errors import install
from ingot.plugins.tensorrt.library import Library, find_rtx
from tests.plugins.cuda.conftest import emulation as emulation
from tests.plugins.cuda.conftest import gpu as gpu
from tests.plugins.cuda.conftest import real_context as real_context


@pytest.fixture
def library() -> Library:
    """TensorRT-RTX as installed."""
    found = find_rtx()
    if isinstance(found, str):
        pytest.skip(f"this machine lacks TensorRT-RTX ({install('tensorrt-rtx')})")
    return found
