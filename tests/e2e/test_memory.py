"""Weights are used where they lie in the mapped file: generating takes little beside the engine and its KV cache."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA

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


def test_resident_memory_while_generating(tmp_path: Path) -> None:
    shape = {**TINY_LLAMA, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3, "vocab_size": 20000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    random = ("--config", tmp_path / "config.json", "--random_weights", 1)
    ingot("convert", *random, "--output_dir", tmp_path / "c").succeeds()
    ingot("build", "--checkpoint_dir", tmp_path / "c", "--output_dir", tmp_path / "e").succeeds()
    engine = (tmp_path / "e/rank0.engine").stat().st_size
    assert engine > ALLOWANCE, "an engine that is read into memory a second time must be noticed"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "e")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert engine < found["resident"] < engine + found["kv"] + ALLOWANCE
