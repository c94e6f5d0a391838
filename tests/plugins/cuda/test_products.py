"""The descriptors of products as the real cuBLASLt reads them back: that needs the library but no GPU."""

import json
import os
import subprocess
import sys

import pytest

from ingot.dtypes import DType
from ingot.plugins.cuda.products import WORKSPACE_BYTES, wheels
from tests.house.project import ROOT
from tests.plugins.cuda.read_back import CASES, ROWS, K, N

CODES = {DType.F32: 0, DType.F16: 2, DType.BF16: 14}  # cudaDataType


def test_the_library_reads_what_was_meant() -> None:
    """In column-major words: weight [K, N] transposed, x [K, rows], y [N, rows], each without gaps."""
    if not wheels():
        pytest.skip("this machine lacks nvidia-cublas")
    command = [sys.executable, "-m", "tests.plugins.cuda.read_back"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for (dtype, out), product in zip(CASES, said["products"], strict=True):
        assert product["weight"] == [CODES[dtype], 0, K, N, K]
        assert product["x"] == [CODES[dtype], 0, K, ROWS, K]
        assert product["y"] == [CODES[out], 0, N, ROWS, N]
        assert product["transposed"] == [1, 0]
    assert said["preferences"] == [WORKSPACE_BYTES, 64, 64, 64, 64]
