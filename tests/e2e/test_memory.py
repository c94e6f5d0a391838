"""Generating takes little beside the engine and its KV cache; converting and building take what they foresaw."""

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command import finish, ingot, start
from tests.handmade import write_model

ALLOWANCE = 150 << 20  # bytes beside engine and KV: interpreter, numpy, activations

MEASURE = """
import json, sys
from pathlib import Path
from ingot.runtime.model_runner import ModelRunner

runner = ModelRunner.from_dir(sys.argv[1])
runner.generate([[1, 5, 9]] * 8, max_new_tokens=24, end_id=-1)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
kv = runner.stats()["blocks_total"] * runner.engine.plan.block_bytes
print(json.dumps({"resident": int(status["VmHWM"].split()[0]) * 1024, "kv": kv}))
"""


@pytest.mark.slow
def test_resident_memory_while_generating(large_checkpoint: Path, tmp_path: Path) -> None:
    build = ("build", "--checkpoint_dir", large_checkpoint, "--output_dir", tmp_path / "e", "--no_autotune")
    ingot(*build, "--no_compression").succeeds()
    engine = (tmp_path / "e/rank0.engine").stat().st_size
    assert engine > 0.7 * ALLOWANCE, "an engine that is read into memory a second time must be noticed"
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "e")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert engine < found["resident"] < engine + found["kv"] + ALLOWANCE


NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 500,
    "hidden_size": 1536,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
}


def resident(output: Path, *args: object) -> tuple[int, int]:
    """(most bytes that a command had resident, bytes that it foresaw), the first as seen from outside.

    What it foresaw to write must be true as well.
    """
    with start(*args, "--output_dir", output) as process:
        most = 0
        while process.poll() is None:
            with contextlib.suppress(OSError, KeyError):  # the process may end at any moment
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                most = int(dict(line.split(":", 1) for line in status)["VmHWM"].split()[0]) * 1024
            time.sleep(0.001)
        result = finish(process).succeeds()
    estimate = re.search(r"needs at most (\S+) MiB of memory and (\S+) MiB of disk", result.err)
    assert estimate is not None
    memory, disk = (round(float(size) * (1 << 20)) for size in estimate.groups())
    written = sum(file.stat().st_size for file in output.iterdir())
    assert written < disk < 1.05 * written
    return most, memory


@pytest.mark.slow
def test_memory_of_a_conversion(tmp_path: Path) -> None:
    """Of 110 MB of weights, the largest, of 28 MB, are made in memory, for their rows are stored in another order."""
    source = write_model(tmp_path / "m", NEOX)
    most, estimate = resident(tmp_path / "c", "convert", "--model_dir", source, "--dtype", "float16")
    assert most < estimate < 2.5 * most
    made = 3 * 1536 * 1536 * 4
    assert estimate < (130 << 20) + 2 * made, "the limit is that of the largest tensor made in memory"


@pytest.mark.slow
def test_memory_of_a_build(large_checkpoint: Path, tmp_path: Path) -> None:
    """It does not grow with the model: of 110 MB of weights, some blocks are in memory at a time."""
    most, estimate = resident(tmp_path / "e", "build", "--checkpoint_dir", large_checkpoint)
    assert most < estimate < 2 * most
