"""The thread pool, its barrier and its stop, as they stand in plugins/cpu/threads.*, in every interleaving of small
teams. Faults are put in beside them, and have to be found."""

import dataclasses
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.project import ROOT

SOURCES = ROOT / "plugins/cpu/threads"
SMALL_GROUPS = ("kMaxThreads = 256, kGroup = Team::kGroup", "kMaxThreads = 6, kGroup = 2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """file: where `right` stands, once; runs: in which the search finds what `wrong` does; words: what it says then."""

    file: str
    right: str
    wrong: str
    runs: str
    words: str


FAULTS = {
    "group 0 first": Fault(
        file="threads.cpp",
        right="for (int group = (count - 1) / kGroup; group >= 0; --group) groups_[group].passed.advance();",
        wrong="for (int group = 0; group <= (count - 1) / kGroup; ++group) groups_[group].passed.advance();",
        runs="1 3 4",
        words="left barrier 1 before thread",
    ),
    "counter kept": Fault(
        file="threads.cpp",
        right="arrived.store(0, std::memory_order_relaxed);",
        wrong="",
        runs="1 2",
        words="counters are not zero",
    ),
    "phase read late": Fault(
        file="threads.cpp",
        right="if (!arrives_last(index, count)) return mine.passed.wait(phase);",
        wrong="if (!arrives_last(index, count)) return mine.passed.wait(mine.passed.value());",
        runs="1 2",
        words="wait, for ever",
    ),
    "sleepers counted early": Fault(
        file="threads.cpp",
        right="word_.fetch_add(1);\n  if (sleepers_.load() > 0) futex(&word_, FUTEX_WAKE_PRIVATE, INT_MAX);",
        wrong="const bool any = sleepers_.load() > 0; word_.fetch_add(1);"
        "if (any) futex(&word_, FUTEX_WAKE_PRIVATE, INT_MAX);",
        runs="1 2",
        words="wait, for ever",
    ),
    "last step without number": Fault(
        file="threads.h",
        right="return last_.load() <= step;",
        wrong="return last_.load() != SIZE_MAX;",
        runs="2 2",
        words="after different steps|wait, for ever|left barrier",
    ),
    "item beyond a share": Fault(
        file="threads.cpp",
        right="if (static_cast<int64_t>(taken) >= items) return -1;",
        wrong="if (static_cast<int64_t>(taken) > items) return -1;",
        runs="1:3 2",
        words="is taken again|is left",
    ),
    "shares of the round before": Fault(
        file="threads.cpp",
        right="taken = seen >> Share::kBits == none >> Share::kBits ? seen - none : 0;",
        wrong="taken = seen & ((uint64_t{1} << Share::kBits) - 1);",
        runs="1:2 2 2",
        words="comes to an end",
    ),
}
# Steps of a job (jobs of one step are not stopped) and items of each step, then the sizes of teams.
FEW = ("1 3 4 2", "2 3 2", "1:4 2 3")
MANY = ("1 4 1 3 4", "1 2 4 3", "3 3 2", "2:3 3 2", "1:4 4")


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program over a copy of the sources, with groups of 2 threads and the faults to choose from."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("this machine lacks a C++ compiler for x86-64")
    folder = tmp_path_factory.mktemp("interleavings")
    (folder / "threads").mkdir()
    texts = {name: (SOURCES / name).read_text() for name in ("threads.h", "threads.cpp")}
    assert texts["threads.h"].count(SMALL_GROUPS[0]) == 1, "the sizes are written in another way"
    texts["threads.h"] = texts["threads.h"].replace(*SMALL_GROUPS)
    for name, fault in FAULTS.items():
        assert texts[fault.file].count(fault.right) == 1, (
            f"{fault.file} is written in another way: write the fault anew"
        )
        both = f'{{ if (FAULT("{name}")) {{ {fault.wrong} }} else {{ {fault.right} }} }}'
        texts[fault.file] = texts[fault.file].replace(fault.right, both)
    for name, text in texts.items():
        (folder / "threads" / name).write_text(text)
    program = folder / "interleavings"
    includes = [f"-I{each}" for each in (folder, ROOT / "plugins/cpu", ROOT / "plugins/include")]
    source = ROOT / "tests/native/interleavings.cpp"
    subprocess.run(["g++", "-std=c++20", "-O2", *includes, str(source), "-o", str(program)], check=True, timeout=200)
    return program


def _run(program: Path, fault: str, runs: str) -> tuple[int, str]:
    done = subprocess.run([program, fault, *runs.split()], capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_small_teams_hold_in_every_interleaving_and_faults_are_found(search: Path) -> None:
    """One test: each process that takes part in it compiles."""
    for runs in FEW:
        status, words = _run(search, "none", runs)
        assert status == 0, f"{runs}: {words}"
        assert int(words.split()[0]) > 10_000  # states: the search has not ended early
    for name, fault in FAULTS.items():
        status, words = _run(search, name, fault.runs)
        assert status == 1, f"{name} was not found: {words}"
        assert re.search(fault.words, words), words


@pytest.mark.slow
@pytest.mark.parametrize("runs", MANY)
def test_larger_teams_hold_too(search: Path, runs: str) -> None:
    status, words = _run(search, "none", runs)
    assert status == 0, words
