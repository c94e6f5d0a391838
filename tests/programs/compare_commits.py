"""Whether a commit is slower than another one on this machine: both run a fixed list of cases in turn.

python -m tests.programs.compare_commits BASE [COMMIT] --work DIR [--model qwen2.5-0.5b] [--rounds 7] [--only w4g128]

Each commit gets a worktree, a native module and engines of its own below --work, which are used again. The build
of BASE times the kernels for both. Ends with code 1 where COMMIT (HEAD) has lost more than 3 % of the speed of BASE in
three rounds of four.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.peers.models import SHAPES, write_model

ROOT = Path(__file__).resolve().parents[2]
LOSS = 0.03
PRECISIONS = ("w4g128", "w8", "bf16")
CASES = ((512, 1), (64, 8), (64, 32))  # tokens of each prompt, requests at once
OUTPUT_LEN = 16
_NATIVE = ("-DCMAKE_BUILD_TYPE=Release", "-DINGOT_IN_PLACE=ON", f"-DPython_EXECUTABLE={sys.executable}")
BUILD = (
    ("cmake", "-S", ".", "-B", "build/native", *_NATIVE),
    ("cmake", "--build", "build/native", f"-j{len(os.sched_getaffinity(0))}"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A case. before, after: milliseconds of each round."""

    name: str
    before: Sequence[float]
    after: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Speed of the commit over that of its base, ascending."""
        return sorted(old / new for old, new in zip(self.before, self.after, strict=True))

    @property
    def spread(self) -> tuple[float, float]:
        """Of half the rounds."""
        quarter = len(self.ratios) // 4
        return self.ratios[quarter], self.ratios[-1 - quarter]

    @property
    def lost(self) -> bool:
        """Whether it is slower by more than LOSS, beyond noise."""
        return self.spread[1] < 1 - LOSS

    def __str__(self) -> str:
        low, high = self.spread
        medians = " | ".join(f"{statistics.median(each):.2f}" for each in (self.before, self.after))
        verdict = "slower" if self.lost else ""
        return (
            f"| {self.name} | {medians} | {statistics.median(self.ratios):.3f} | {low:.3f} - {high:.3f} | {verdict} |"
        )


def prepare(commit: str, work: Path, repository: Path = ROOT) -> Path:
    """A worktree of the commit with its native module."""
    found = _run("git", "rev-parse", "--verify", f"{commit}^{{commit}}", cwd=repository).strip()
    root, built = work / found[:12], work / f"{found[:12]}.built"
    if not built.exists():
        if not root.exists():
            _run("git", "worktree", "add", "--force", "--detach", str(root), found, cwd=repository)
        for command in BUILD:
            _run(*command, cwd=root)
        built.touch()
    return root


def chosen(only: Sequence[str]) -> list[tuple[str, int, int]]:
    """(precision, tokens, requests) of the cases whose names hold one of these texts; of all without texts."""
    every = [(precision, length, batch) for precision in PRECISIONS for length, batch in CASES]
    return [each for each in every if not only or any(text in name_of(*each) for text in only)]


def name_of(precision: str, length: int, batch: int) -> str:
    """As in the table."""
    return f"{precision}, {batch} x {length} tokens"


def compare(
    roots: Sequence[Path], model: Path, work: Path, rounds: int, cases: Sequence[tuple[str, int, int]]
) -> list[Row]:
    """Times to the first token and per token of both worktrees, after a round that does not count."""
    rows = []
    for precision in dict.fromkeys(precision for precision, _, _ in cases):
        engines = [_engine(root, model, work, precision) for root in roots]
        for length, batch in (each[1:] for each in cases if each[0] == precision):
            times: list[list[tuple[float, float]]] = [[], []]
            for number in range(rounds + 1):
                for which, (root, engine) in enumerate(zip(roots, engines, strict=True)):
                    measured = _latency(root, engine, length, batch)
                    if number > 0:
                        times[which].append(measured)
            for index, name in enumerate(("TTFT", "TPOT")):
                before, after = ([each[index] for each in side] for side in times)
                rows.append(Row(name=f"{name_of(precision, length, batch)}, {name}", before=before, after=after))
    return rows


def _engine(root: Path, model: Path, work: Path, precision: str) -> Path:
    checkpoint, engine = (work / f"{root.name}-{model.name}-{each}" for each in ("checkpoint", precision))
    if not checkpoint.exists():
        _ingot(root, "convert", "--model_dir", model, "--output_dir", checkpoint)
    if not engine.exists():
        timed = ("--timing_cache", work / f"{model.name}-{precision}.times")  # a busy minute decides for both
        _ingot(root, "build", "--checkpoint_dir", checkpoint, "--output_dir", engine, "--precision", precision, *timed)
    return engine


def _latency(root: Path, engine: Path, length: int, batch: int) -> tuple[float, float]:
    lengths = ("--input_len", length, "--output_len", OUTPUT_LEN, "--batch_size", batch, "--repetitions", 1)
    measured = json.loads(_ingot(root, "bench", "latency", "--engine_dir", engine, *lengths, "--json"))["batches"][0]
    return measured["ttft_ms"], measured["tpot_ms"]


def _ingot(root: Path, *arguments: object) -> str:
    return _run(sys.executable, "-m", "ingot", *map(str, arguments), cwd=root, PYTHONPATH=str(root / "src"))


def _run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(command)} in {cwd}\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    """Compare, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--work", type=Path, required=True, help="folder for worktrees, models and engines")
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b", help="whose shape; the weights are random")
    parser.add_argument("--rounds", type=int, default=7, help="at least 4, after one that does not count")
    parser.add_argument("--only", action="append", default=[], help="cases whose names hold this; may be repeated")
    options = parser.parse_args()
    if not (cases := chosen(options.only)):
        every = "; ".join(name_of(*each) for each in chosen([]))
        parser.error(f"--only: no case has {' or '.join(options.only)} in its name; there are: {every}")
    if options.rounds < 4:
        parser.error("--rounds must be at least 4")
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    roots = [prepare(each, work) for each in (options.base, options.commit)]
    if not (work / options.model).exists():
        write_model(SHAPES[options.model], work / options.model)
    rows = compare(roots, work / options.model, work, options.rounds, cases)
    print(f"{options.base} ({roots[0].name}) and {options.commit} ({roots[1].name}), {options.rounds} rounds in turn")
    print("| case | before, ms | after, ms | speed | of half the rounds | |\n|---|---|---|---|---|---|")
    print("\n".join(map(str, rows)))
    return 1 if any(row.lost for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
