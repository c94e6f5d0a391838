"""Memory of `ingot quantize`: the most that its process had resident, by number of layers.

python -m tests.programs.quantize_memory [--layers 2 --layers 4] [--hidden 4096] [--inner 14336] [--heads 32]
    [--kv_heads 8] [--vocab 128256] [--recipe w4g128] [--calibration_tokens 8192]

Weights are random, and written for each number of layers in turn. The widths are those of Llama 3.1 8B unless options
say others. Prints what the command says beforehand, the peak, the time, and the CPU time, which other processes
change less.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.peers.models import SHAPES, write_model

# wait4 would tell the peak of this process, which writes the model, where that is larger
_RUN = """
import atexit, runpy
from ingot.runtime.memory import peak_memory
atexit.register(lambda: print("peak", peak_memory()))
runpy.run_module("ingot", run_name="__main__")
"""


def row(arguments: argparse.Namespace, layers: int, work: Path) -> str:
    """A line of the table."""
    shape = {
        **SHAPES["tinyllama"],
        "num_hidden_layers": layers,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.inner,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "head_dim": arguments.hidden // arguments.heads,
        "vocab_size": arguments.vocab,
    }
    write_model(shape, work / "model")
    command = [sys.executable, "-c", _RUN, "quantize", "--model_dir", str(work / "model")]
    command += ["--output_dir", str(work / "quantised"), "--recipe", arguments.recipe]
    command += ["--calibration_tokens", str(arguments.calibration_tokens)]
    begin, log = time.monotonic(), work / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text()
    if process.returncode:
        raise SystemExit(text)
    said = re.search(r"quantising.*?([\d.]+ [KMG]iB) of memory", text)
    estimate = said[1] if said else "?"
    peak = int(text.rsplit("peak ", 1)[1]) / 2**30
    cpu = used.ru_utime + used.ru_stime
    return f"| {layers} | {estimate} | {peak:.3f} GiB | {time.monotonic() - begin:.0f} s | {cpu:.0f} s |"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, action="append")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--recipe", default="w4g128")
    parser.add_argument("--calibration_tokens", type=int, default=8192)
    arguments = parser.parse_args()
    print("| layers | estimate | peak | time | CPU time |\n|---|---|---|---|---|", flush=True)
    for layers in arguments.layers or [2, 4]:
        with tempfile.TemporaryDirectory() as name:
            print(row(arguments, layers, Path(name)), flush=True)


if __name__ == "__main__":
    main()
