"""Weights are used where they lie in the mapped file: generating takes little beside the engine and its KV cache."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.command import ingot

ALLOWANCE = 150 << 20  # bytes beside engine and KV: interpreter, numpy, activations

MEASURE = """
import json, sys
from pathlib import Path
from ingot.runtime.model_runner import ModelRunner

runner = ModelRunner.from_dir(sys.argv[1])
runner.generate([[1, 5, 9]] * 8, max_new_tokens=24, end_id=-1)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
kv = runner.stats()["blocks_total"] * runner.engine.plan.kv.block_bytes
print(json.dumps({"resident": int(status["VmHWM"].split()[0]) * 1024, "kv": kv}))
"""


def test_resident_memory_while_generating(large_checkpoint: Path, tmp_path: Path) -> None:
    ingot("build", "--checkpoint_dir", large_checkpoint, "--output_dir", tmp_path / "e").succeeds()
    engine = (tmp_path / "e/rank0.engine").stat().st_size
    assert engine > 0.7 * ALLOWANCE, "an engine that is read into memory a second time must be noticed"
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "e")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert engine < found["resident"] < engine + found["kv"] + ALLOWANCE
