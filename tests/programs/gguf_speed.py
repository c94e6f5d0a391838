"""The same GGUF file in ingot and in llama.cpp: which is faster? Both run in turn, each time in a process of its own.

    python -m tests.programs.gguf_speed MODEL_DIR WORK [TYPE ...] [--rounds N] [--prompt N] [--tokens N] [--threads N]

Needs the packages gguf and xllamacpp, as `tests.programs.gguf_tokens`, which says what the files are. Files and engines
stay in WORK, and are used again. Prompts are random tokens; sampling is greedy. A row has tokens per second, the median
of the rounds, and of each round ingot's speed over that of llama.cpp.
"""

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.bench.timing import time_requests
from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_manifest
from ingot.export.export import export
from ingot.runtime import ModelRunner
from tests.programs.gguf_tokens import FILE_TYPES, write_file

SHORT = 16  # tokens of a prompt before decode
PROGRAMS = ("ingot", "llama.cpp")

Speeds = tuple[float, float]
"""Tokens per second of a prompt, and of decode."""


def prepare(model: Path, work: Path, kind: str) -> str:
    """WORK/KIND.gguf and WORK/KIND.engine; the engine's precision."""
    work.mkdir(parents=True, exist_ok=True)
    path, checkpoint, engine = work / f"{kind}.gguf", work / kind, work / f"{kind}.engine"
    if not path.exists():
        if not (work / "plain.gguf").exists():
            convert(ConvertOptions(model_dir=model, output_dir=work / "checkpoint"))
            export(work / "checkpoint", work / "plain.gguf", "gguf")
        write_file(work / "plain.gguf", kind, path)
    convert(ConvertOptions(model_dir=path, output_dir=checkpoint))
    return build(BuildConfig(), checkpoint, engine).precision


def ingot_speeds(engine: Path, threads: int, prompt: list[int], tokens: int) -> Speeds:
    """Through the executor of the server, draws included."""
    with ModelRunner.from_dir(engine, threads=threads) as runner:
        time_requests(runner, [prompt[:SHORT]], 4)
        first = time_requests(runner, [prompt], 1).requests[0].ttft
        measured = time_requests(runner, [prompt[:SHORT]], tokens + 1)
        return len(prompt) / first, tokens / (measured.seconds - measured.requests[0].ttft)


def llama_speeds(path: Path, threads: int, prompt: list[int], tokens: int) -> Speeds:
    """What its server reports."""
    llama = importlib.import_module("xllamacpp")
    options = llama.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(path), len(prompt) + tokens + SHORT, 1
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
    server = llama.Server(options)

    def timings(ids: list[int], count: int) -> dict[str, float]:
        asked = {"prompt": ids, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(asked)
        found: dict[str, float] = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        return found

    timings(prompt[:SHORT], 4)
    return timings(prompt, 2)["prompt_per_second"], timings(prompt[:SHORT], tokens)["predicted_per_second"]


def turn(program: str, work: Path, kind: str, options: argparse.Namespace) -> Speeds:
    """One program in a process of its own. Raises CalledProcessError."""
    command = [sys.executable, "-m", "tests.programs.gguf_speed", str(options.model), str(work), kind]
    command += [f"--{key}={getattr(options, key)}" for key in ("prompt", "tokens", "threads")]
    done = subprocess.run([*command, "--turn", program], stdout=subprocess.PIPE, text=True, check=True)
    prompt, decode = json.loads(done.stdout.splitlines()[-1])
    return float(prompt), float(decode)


def row(kind: str, precision: str, turns: Sequence[Sequence[Speeds]]) -> str:
    """turns: of each program, those of all rounds."""
    cells = [kind, precision]
    for what in (0, 1):
        ours, theirs = ([speeds[what] for speeds in each] for each in turns)
        ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(ours, theirs, strict=True))
        cells += [f"{statistics.median(ours):.0f}", f"{statistics.median(theirs):.0f}", ratios]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a Hugging Face directory")
    parser.add_argument("work", type=Path, metavar="WORK", help="a folder for files and engines")
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"of {', '.join(FILE_TYPES)}; default: all but F32")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (%(default)s); 0 only makes the files")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt that is timed (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens that are decoded (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each (%(default)s)")
    parser.add_argument("--turn", choices=PROGRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = options.types or [each for each in FILE_TYPES if each != "F32"]
    if options.turn is not None:
        draw = random.Random(0)
        prompt = [draw.randrange(301, 2000) for _ in range(max(options.prompt, SHORT))]
        numbers = (options.threads, prompt, options.tokens)
        ours = options.turn == PROGRAMS[0]
        file = options.work / f"{kinds[0]}.{'engine' if ours else 'gguf'}"
        print(json.dumps(ingot_speeds(file, *numbers) if ours else llama_speeds(file, *numbers)))
        return
    head = "| file | engine | prompt: ingot | llama.cpp | ratios | decode: ingot | llama.cpp | ratios |"
    print(f"{head}\n{'|---' * 8}|")
    for kind in kinds:
        engine = options.work / f"{kind}.engine"
        precision = read_manifest(engine).precision if engine.exists() else prepare(options.model, options.work, kind)
        rounds = [[turn(each, options.work, kind, options) for each in PROGRAMS] for _ in range(options.rounds)]
        if rounds:
            print(row(kind, precision, list(zip(*rounds, strict=True))), flush=True)


if __name__ == "__main__":
    main()
