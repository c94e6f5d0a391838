"""Compare ingot with other engines: python examples/compare_peers/compare.py --work DIR --model tinyllama."""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder is the package compare_peers
runpy.run_module("compare_peers", run_name="__main__")
