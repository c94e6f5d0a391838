"""What every adapter understands and answers.

python -m tests.peers.adapters.NAME ACTION JOB    JOB: the fields of `Job`, JSON

prepare   checkpoint → the engine's own files
measure   print {"version": ..., "tokens_per_second": {regime: speed}} as the only line on stdout
and where `peers.py` says so
install   build the engine itself, which no package does
lengthen  checkpoint → files for long prompts too, where the others are too short
install_server  build the engine's server
serve     be its server, on the port that is the argument after JOB
load      read a load from stdin, put it on the engine, print what became of it: for engines without a server

Imported in every engine's environment: nothing but the standard library.
"""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.peers.regimes import Regime, parse_regimes

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], tuple[float, float]]
"""(prompts, tokens to generate for each) → (seconds until all have their first token, seconds from there to the end)"""

WARM_UP = 512  # tokens at most of a prompt that does not count
FILE = " file"  # what follows the kind of a GGUF file in a job's weights
FIRST_ID, LAST_ID = 301, 31_000  # ordinary tokens of every model's vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """weights: what the engine calls this precision; regimes: as text."""

    work: Path
    model: str
    peer: str
    weights: str
    isa: str
    threads: int
    regimes: str

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face directory that all engines start from."""
        return self.work / self.model / "checkpoint"

    @property
    def folder(self) -> Path:
        """For the engine's own files of this model."""
        return self.work / self.model / self.peer

    @property
    def prepared(self) -> Path:
        """For the engine's own files of this model in this precision."""
        return self.folder / self.weights.lower().replace(" ", "-")

    @property
    def of_file(self) -> str:
        """Where weights are a GGUF file that several engines read: its kind, such as Q4_K_M; else nothing."""
        return self.weights.removesuffix(FILE) if self.weights.endswith(FILE) else ""

    @property
    def file(self) -> Path:
        """That file, the same for all engines."""
        return self.work / self.model / "gguf" / f"{self.of_file}.gguf"

    def as_json(self) -> str:
        """What `serve` reads."""
        return json.dumps({**dataclasses.asdict(self), "work": str(self.work)})

    @staticmethod
    def from_json(text: str) -> "Job":
        """What `as_json` wrote."""
        fields = json.loads(text)
        return Job(**{**fields, "work": Path(fields["work"])})


def serve(
    prepare: Callable[[Job], None],
    measure: Callable[[Job], tuple[str, dict[str, float]]],
    others: Mapping[str, Callable[[Job], str | None]] = MappingProxyType({}),
) -> None:
    """Do what the command line asks; others: further actions. Whatever libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    action, job = sys.argv[1], Job.from_json(sys.argv[2])
    answer: str | None = None
    if action == "measure":
        version, speeds = measure(job)
        answer = json.dumps({"version": version, "tokens_per_second": speeds})
    elif action == "prepare":
        prepare(job)
    else:
        answer = others[action](job)
    if answer is not None:
        print(answer, file=answers, flush=True)


def become(*command: object) -> None:
    """Of an adapter that serves: the server takes its place."""
    words = [str(part) for part in command]
    os.execv(words[0], words)


def random_prompts(random_ids: random.Random, count: int, length: int) -> Prompts:
    """All different, so that no prefix cache helps."""
    return [[random_ids.randrange(FIRST_ID, LAST_ID) for _ in range(length)] for _ in range(count)]


def time_regimes(generate: Generate, regimes: Sequence[Regime]) -> dict[str, float]:
    """Tokens per second of every regime, each after a shorter one of the same kind that does not count."""
    random_ids, speeds = random.Random(0), {}
    for regime in regimes:
        if regime.kind == "decode":
            generate(random_prompts(random_ids, regime.sequences, 8), 3)
        else:
            generate(random_prompts(random_ids, 1, min(regime.prompt, WARM_UP)), 1)
        first, rest = generate(random_prompts(random_ids, regime.sequences, regime.prompt), regime.generated)
        speeds[regime.name] = regime.timed_tokens / (rest if regime.kind == "decode" else first)
    return speeds


def regimes_of(job: Job) -> tuple[Regime, ...]:
    """Parsed."""
    return parse_regimes(job.regimes)
