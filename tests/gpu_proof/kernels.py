"""Part b: the tests of every CUDA kernel on the machine's own GPU, then small cases under compute-sanitizer."""

import os
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.gpu_proof.result import Check, Result
from tests.gpu_proof.work import Job

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    *("kernels", "paged_attention", "own_products", "wide_products", "experts", "wide_experts", "draws"),
    *("latent", "states", "codes_of_kv", "head_sizes"),
    *("session", "verify", "kept_codes", "decode_graphs", "read_twice"),
)
FILES = [f"tests/plugins/cuda/test_{name}.py" for name in TESTS]
SMALL = [*FILES[:2], "-k", "norms or rope_and_cache or softcap or (windows and 33) or (splits and (3 or empty))"]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SM = "90"  # what the tests compile for
SECONDS = 510


def kernels(job: Job) -> Iterator[Check]:
    """One check for each file of tests, one for each tool."""
    for file in FILES:
        yield Check.of(file, _of_file, job, file)
    for tool in TOOLS:
        yield Check.of(tool, _of_tool, job, tool)


def _of_file(job: Job, file: str) -> Result:
    return _unless_other_sm(job, file) or run(file, _pytest([file], job.work), job.work)


def _of_tool(job: Job, tool: str) -> Result:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "86", *_pytest(SMALL, job.work)]
    if (other := _unless_other_sm(job, tool)) is not None:
        return other
    if shutil.which("compute-sanitizer") is None:
        return Result(name=tool, command=shlex.join(command), missing="compute-sanitizer is not on the path")
    return run(tool, command, job.work)


def _unless_other_sm(job: Job, name: str) -> Result | None:
    if job.gpu.sm == SM:
        return None
    missing = f"the tests need a GPU of sm_{SM}; this machine has {job.gpu.name} (sm_{job.gpu.sm})"
    return Result(name=name, command=shlex.join(_pytest(FILES, job.work)), missing=missing)


def _pytest(what: Sequence[str], work: Path) -> list[str]:
    """Warnings stay warnings: that machine's Python and libraries may be newer than those that were tried."""
    report = f"--junitxml={work / 'tests.xml'}"
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--real-gpu",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        report,
        *what,
    ]


def run(name: str, command: Sequence[str], work: Path) -> Result:
    """Exit code, counts of the tests, and the last lines where something is wrong."""
    report = work / "tests.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return Result(name=name, command=shlex.join(command), ok=False, figures={"ended": f"after {SECONDS} s"})
    figures: dict[str, object] = {"exit_code": done.returncode}
    if report.is_file():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None, "pytest writes one"
        figures |= {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    if done.returncode:
        figures["said"] = (done.stdout + done.stderr)[-4000:]
    return Result(name=name, command=shlex.join(command), ok=done.returncode == 0, figures=figures)
