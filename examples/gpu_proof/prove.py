"""What a real GPU makes of GPU engines: python examples/gpu_proof/prove.py --work DIR [--parts a,b,c,d]."""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this folder is the package gpu_proof
runpy.run_module("gpu_proof", run_name="__main__")
