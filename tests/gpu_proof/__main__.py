"""Options → the parts of the list, each in a process of its own → a JSON file per part.

    python -m tests.gpu_proof --work DIR --parts a,b,c --model MODEL_DIR --sort_model MODEL_DIR
    python -m tests.gpu_proof --work DIR --parts d --shapes llama-3.2-1b

a   does TensorRT-RTX take this GPU?
b   every CUDA kernel against its reference, small cases under compute-sanitizer
c   tiny real models: the tokens of the CPU engine in f32, layers against the Checkpoint, 729 sorts
d   speed of shapes with random weights, beside the machine's limits and transformers
e   every kernel alone: of each weight format, and of models with experts, states, latents or large heads

A part is a row of checks, none longer than nine minutes. Each result is on disk as soon as it is there. What ended is
kept in the folder of work: the same command goes on where an earlier one was cut off, and --again does all of it again.

Without a GPU each part says in a line what is missing. Exit code 0: everything is as it should be; 1: something is not,
or could not be done; 2: wrong usage.
"""

import argparse
import dataclasses
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import ingot
from ingot.errors import IngotError
from ingot.plugins.cuda.gpu import find_gpus
from tests.gpu_proof.kernels import kernels
from tests.gpu_proof.kinds import checks as kinds
from tests.gpu_proof.result import Check, Kept, Result, ResultFile
from tests.gpu_proof.rtx import checks as rtx_checks
from tests.gpu_proof.shapes import SHAPES
from tests.gpu_proof.speed import speed
from tests.gpu_proof.tokens import tokens
from tests.gpu_proof.work import Job

COMMAND = ("python", "-m", "tests.gpu_proof")
RESULTS = Path(__file__).resolve().with_name("results")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """what: in words."""

    what: str
    checks: Callable[[Job], Iterable[Check]]


PARTS: Mapping[str, Part] = {
    "a": Part(what="does TensorRT-RTX take this GPU?", checks=rtx_checks),
    "b": Part(what="every CUDA kernel against its reference", checks=kernels),
    "c": Part(what="tiny real models: tokens and layers", checks=tokens),
    "d": Part(what="speed on random weights", checks=speed),
    "e": Part(what="kernels of each weight format and of other kinds of layers", checks=kinds),
}


def main(arguments: Sequence[str]) -> int:
    """Exit code."""
    given = parse(arguments)
    parts = given.parts.split(",")
    found = find_gpus()
    if found.why_not is not None:
        for name in parts:
            print(f"{name} ({PARTS[name].what}): not done: {found.why_not}")
        return 1
    if len(parts) > 1:  # what ends one process leaves the others
        rest = _without_parts(arguments)
        codes = [
            subprocess.run([sys.executable, *COMMAND[1:], *rest, "--parts", part], check=False).returncode
            for part in parts
        ]
        return int(any(codes))
    (name,) = parts
    part = PARTS[name]
    job = Job(
        work=given.work,
        gpu=found.gpus[0],
        models=given.model or [],
        sort_model=given.sort_model,
        shapes=given.shapes.split(","),
        batches=[int(each) for each in given.batches.split(",")],
        prompts=[int(each) for each in given.prompts.split(",")],
        context=given.context,
        output=given.output,
        repetitions=given.repetitions,
        transformers=not given.no_transformers,
    )
    job.work.mkdir(parents=True, exist_ok=True)
    file = ResultFile(given.results, name, part.what, shlex.join([*COMMAND, *arguments]), found)
    asked = {key: str(value) for key, value in vars(given).items() if key not in ("results", "again", "parts")}
    kept = Kept(job.work / f"kept-{name}.json", {"gpu": job.gpu.name, "version": ingot.__version__, **asked})
    code = 0
    for check in part.checks(job):
        results = None if given.again else kept.find(check.name)
        before = results is not None
        first = len(job.found)
        for result in _results(check) if results is None else results:
            print(f"{name} {result.line()}{' (kept)' if before else ''}", flush=True)
            file.add(result)
            job.found.append(result)
            code |= result.ok is False or result.missing is not None
        if not before:
            kept.add(check.name, job.found[first:])
    print(f"{name}: {file.path}")
    return int(code)


def _results(check: Check) -> Iterator[Result]:
    """What goes wrong in one check leaves the others."""
    try:
        yield from check.run()
    except IngotError as error:
        yield Result(name=check.name, command="", ok=False, missing=str(error))
    except Exception:  # a GPU is rented by the minute: the other checks go on
        said = traceback.format_exc()[-2000:]
        yield Result(name=check.name, command="", ok=False, figures={"raised": said})


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Ends the process with code 2 and words where something is wrong."""
    parser = argparse.ArgumentParser(
        prog=" ".join(COMMAND), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and engines, used again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files (%(default)s)")
    parser.add_argument("--again", action="store_true", help="also what is kept of an earlier run")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, comma between (%(default)s)")
    parser.add_argument("--model", type=Path, action="append", metavar="DIR", help="c: one more Hugging Face directory")
    parser.add_argument("--sort_model", type=Path, metavar="DIR", help="c: a model that sorts six letters of three")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="d: (%(default)s)")
    parser.add_argument("--batches", default="1,8,64,256", help="d: sequences that decode together (%(default)s)")
    parser.add_argument(
        "--context", type=int, default=1024, help="d: tokens before the first decoded one (%(default)s)"
    )
    parser.add_argument("--output", type=int, default=64, help="d: decoded tokens (%(default)s)")
    parser.add_argument("--prompts", default="2048,8192", help="d: tokens of a prefill (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="d: timed rounds (%(default)s)")
    parser.add_argument(
        "--no_transformers", action="store_true", help="d: leave out the comparison, which takes minutes"
    )
    given = parser.parse_args(arguments)
    for what, names, known in (("part", given.parts, PARTS), ("shape", given.shapes, SHAPES)):
        if unknown := [each for each in names.split(",") if each not in known]:
            parser.error(f"there is no {what} {unknown[0]!r}: expected some of {', '.join(known)}")
    for what, numbers in (("--batches", given.batches), ("--prompts", given.prompts)):
        if not all(each.isdigit() and int(each) > 0 for each in numbers.split(",")):
            parser.error(f"{what}: expected numbers above 0 with commas between, got {numbers!r}")
    return given


def _without_parts(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for each in arguments:
        if not skip and not each.startswith("--parts"):
            kept.append(each)
        skip = each == "--parts"
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
