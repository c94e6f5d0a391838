"""A list of faults → which of them the tests notice.

Every fault replaces one piece of text in a copy of the tree, runs the tests that are named for it, and is taken back.
It is noticed where a test fails, or does not end. Before that the same tests must pass without any fault.
"""

import contextlib
import dataclasses
import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")
LEFT_OUT = (".git", ".venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
PASSED, FAILED, COLLECTING = 0, 1, 2  # pytest's exit statuses: a module that no longer imports stops collecting


class MutationError(Exception):
    """The list does not fit the tree."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """old: text that is once in `file`. tests: arguments for pytest. what: the fault in words."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """The file's text with the fault."""
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise MutationError(f"{self.file}: {self.what}: its old text is there {found} times, expected once")
        return text.replace(self.old, self.new)


def read_faults(path: Path, tree: Path) -> list[Fault]:
    """The list. Raises MutationError for a fault that cannot be planted in the tree, or whose tests are not there."""
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in tomllib.loads(path.read_text())["fault"]]
    for fault in faults:
        for name in (fault.file, *(test.split("::")[0] for test in fault.tests)):
            if not (tree / name).exists():
                raise MutationError(f"{fault.what}: there is no {name}")
        fault.planted_in((tree / fault.file).read_text())
    return faults


def run_faults(
    faults: Sequence[Fault], tree: Path, jobs: int, seconds: float, say: Callable[[Fault, bool], None]
) -> list[Fault]:
    """Those that no test noticed. Raises MutationError where tests fail without a fault."""
    with _copies(tree, jobs) as copies, ThreadPoolExecutor(max_workers=jobs) as pool:
        tests = sorted({test for fault in faults for test in fault.tests})
        parts = [tests[first::jobs] for first in range(jobs)]
        for part, status in zip(
            parts, pool.map(lambda part: _in_a_copy(copies, part, 10 * seconds), parts), strict=True
        ):
            if part and status != PASSED:
                raise MutationError(f"tests fail without a fault: pytest ended with {status} for {' '.join(part)}")

        def check(fault: Fault) -> bool:
            with _borrowed(copies) as copy:
                place = copy / fault.file
                sound = place.read_text()
                place.write_text(fault.planted_in(sound))
                try:
                    status = _pytest(copy, fault.tests, seconds)
                finally:
                    place.write_text(sound)
            if status not in (None, PASSED, FAILED, COLLECTING):
                raise MutationError(f"{fault.what}: pytest ended with {status} for {' '.join(fault.tests)}")
            say(fault, status != PASSED)
            return status != PASSED

        return [fault for fault, noticed in zip(faults, pool.map(check, faults), strict=True) if not noticed]


@contextlib.contextmanager
def _copies(tree: Path, count: int) -> Iterator["queue.Queue[Path]"]:
    """Copies of the tree, each with the native module that is installed here."""
    native = importlib.util.find_spec("ingot._cpu")
    with tempfile.TemporaryDirectory(prefix="ingot-mutation-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            copy = Path(folder) / str(number) / tree.name
            shutil.copytree(tree, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
            if native is not None and native.origin is not None:
                shutil.copy(native.origin, copy / "src" / "ingot")
            if (shared := tree.parent / "shared").is_dir():
                (copy.parent / "shared").symlink_to(shared)
            copies.put(copy)
        yield copies


@contextlib.contextmanager
def _borrowed(copies: "queue.Queue[Path]") -> Iterator[Path]:
    copy = copies.get()
    try:
        yield copy
    finally:
        copies.put(copy)


def _in_a_copy(copies: "queue.Queue[Path]", tests: Sequence[str], seconds: float) -> int | None:
    if not tests:
        return PASSED
    with _borrowed(copies) as copy:
        return _pytest(copy, tests, seconds)


def _pytest(copy: Path, tests: Sequence[str], seconds: float) -> int | None:
    """Its exit status; None where it did not end in time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what tests started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
