"""`ingot bench start`: from the start of a process to its first token, each time in a process of its own.

start ──interpreter──▶ ──imports──▶ ──open: map, check, bind──▶ ──prefill, draw──▶ first token
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.bench.latency import check_lengths
from ingot.bench.timing import random_prompts
from ingot.engine import read_manifest, read_plan
from ingot.errors import EngineError, IngotError
from ingot.runtime.memory import peak_memory
from ingot.runtime.model_runner import ModelRunner

_CODE = "import time; began = time.monotonic(); from ingot.bench.cold_start import first_token; first_token(began)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """warmup: processes before the timed ones, after which the engine's files are in the page cache."""

    engine_dir: Path
    input_len: int = 32
    warmup: int = 1
    repetitions: int = 5
    seed: int = 0
    threads: int | None = None
    isa: str | None = None
    target: str | None = None
    use_mmap: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """Medians over processes, in milliseconds and bytes.

    peak_bytes    the most that was resident, weights included
    beside_bytes  what of it is not weights: KV cache, activations, Python
    """

    engine: str
    target: str
    input_len: int
    repetitions: int
    interpreter_ms: float
    import_ms: float
    open_ms: float
    first_token_ms: float
    total_ms: float
    peak_bytes: int
    beside_bytes: int


def bench_start(options: StartOptions, progress: Callable[[str, int, int], None]) -> StartReport:
    """Start `warmup` + `repetitions` processes, one after another. Raises EngineError with the words of one that
    fails."""
    manifest, plan = read_manifest(options.engine_dir), read_plan(options.engine_dir)
    check_lengths(manifest.limits, input_len=options.input_len, output_len=1)
    total = options.warmup + options.repetitions
    found: list[dict[str, Any]] = []
    for index in range(total):
        progress("processes", index, total)
        (prompt,) = random_prompts(1, options.input_len, plan.vocab_size, options.seed, index)
        told = _process(options, prompt)
        if index >= options.warmup:
            found.append(told)
    progress("processes", total, total)
    medians = {name: statistics.median(told[name] for told in found) for name in found[0] if name != "target"}
    return StartReport(
        engine=str(options.engine_dir),
        target=found[0]["target"],
        input_len=options.input_len,
        repetitions=options.repetitions,
        peak_bytes=int(medians.pop("peak_bytes")),
        beside_bytes=int(medians.pop("beside_bytes")),
        **medians,
    )


def _process(options: StartOptions, prompt: list[int]) -> dict[str, Any]:
    """What a process says of itself."""
    asked = {
        "engine_dir": str(options.engine_dir),
        "threads": options.threads,
        "isa": options.isa,
        "target": options.target,
        "use_mmap": options.use_mmap,
        "prompt": prompt,
    }
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps({**asked, "start": start}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EngineError(
            "a process could not start the engine",
            where=str(options.engine_dir),
            got="\n" + textwrap.indent(done.stderr.strip() or f"exit status {done.returncode}", "    "),
        )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def first_token(began: float) -> None:
    """The process: reads what is asked from stdin, writes times and memory to stdout. began: when Python was up."""
    imported = time.monotonic()
    asked = json.load(sys.stdin)
    prompt, start = asked.pop("prompt"), asked.pop("start")
    try:
        runner = ModelRunner.from_dir(**asked)
        opened = time.monotonic()
        runner.generate([prompt], max_new_tokens=1, end_id=-1)
        ended = time.monotonic()
    except IngotError as error:
        sys.exit(str(error))
    times = {
        "interpreter_ms": began - start,
        "import_ms": imported - began,
        "open_ms": opened - imported,
        "first_token_ms": ended - opened,
        "total_ms": ended - start,
    }
    peak = peak_memory()
    memory = {"peak_bytes": peak, "beside_bytes": peak - runner.engine.plan.weight_bytes}
    milliseconds = {name: 1e3 * seconds for name, seconds in times.items()}
    print(json.dumps({"target": runner.engine.manifest.target, **milliseconds, **memory}))
    runner.close()
