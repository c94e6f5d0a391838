"""Fixtures that every room's tests share, and the account of skipped tests."""

import gc
import os
import signal
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SLOW_SECONDS = 1800  # that a test marked slow may take

# Of workers and of what they start, read when numpy is imported: threads of BLAS that wait for others keep cores busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models, texts and tokenizers that may lie beside the checkout."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_disks() -> Iterator[None]:
    """What tests write need not outlive the machine. Processes that they start write as users' do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def _all_cpus_again() -> Iterator[None]:
    """Some tests make their own process rank 0, which keeps to its share of the CPUs; those after them have all."""
    cpus = os.sched_getaffinity(0)
    yield
    if os.sched_getaffinity(0) != cpus:
        os.sched_setaffinity(0, cpus)


def pytest_configure() -> None:
    """A background job starts with SIGINT ignored; tests of Ctrl-C, here and in processes they start, need it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile(
        "ingot",
        deadline=None,  # machines are shared: how long an example takes tells nothing
        # what was found is told as it is found: shrinking takes minutes where an example runs a model
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate],
        print_blob=True,
    )
    hypothesis.settings.load_profile("ingot")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a function marked daily(count), as many cases stay in the tests of every day, and the others are slow: always
    the same ones, drawn by their names. Slow tests have a limit of their own, unless they say another one."""
    cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        if (daily := item.get_closest_marker("daily")) is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0], daily.args[0]].append(item)
    for (_, count), several in cases.items():
        for item in sorted(several, key=lambda each: zlib.crc32(each.nodeid.encode()))[count:]:
            item.add_marker(pytest.mark.slow)
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end: the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A worker gets a row of files, and takes from another one's end when it is done, unless --dist says otherwise:
    fixtures and references of a file are made once. A worker that crashes costs the test that it ran."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-gpu", action="store_true", help="tests of CUDA kernels use this machine's GPU of sm_90")
    parser.addoption(
        "--emulated-twins",
        action="store_true",
        help="test emulated CPU kernels where the machine has the real ones, too",
    )
    parser.addoption(
        "--allowed-skips", metavar="FILE", help="fail the run if a test is skipped for a reason that FILE does not list"
    )


def skip_reasons(terminal: pytest.TerminalReporter) -> Counter[str]:
    """Reason → how many tests were skipped for it."""
    reports = terminal.stats.get("skipped", [])
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def unlisted(reasons: Counter[str], allowed: str) -> list[str]:
    """The reasons that no line of `allowed` begins; lines with # are comments."""
    lines = [line.strip() for line in allowed.splitlines() if line.strip() and not line.startswith("#")]
    return sorted(reason for reason in reasons if not any(reason.startswith(line) for line in lines))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print every reason with its count; an unlisted one is an error of the session."""
    reasons = skip_reasons(terminalreporter)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
    file = config.getoption("--allowed-skips")
    if file and (extra := unlisted(reasons, Path(file).read_text())):
        for reason in extra:
            terminalreporter.write_line(f"ERROR: skips for a reason that {file} does not list: {reason}", red=True)
        config.stash[_UNLISTED] = extra


_UNLISTED = pytest.StashKey[list[str]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> object:
    """The terminal summary is written inside this hook; what it found decides the exit status."""
    result = yield
    if session.config.stash.get(_UNLISTED, []) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result
