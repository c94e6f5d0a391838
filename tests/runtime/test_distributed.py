"""How ranks wait for each other while they open an engine; with MPI itself they meet in tests/e2e."""

import contextlib
import dataclasses
import functools
import mmap
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import CapacityError, RankError
from ingot.runtime import distributed, forward_signals
from ingot.runtime.distributed import MpiLink


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def request_of(clock: Clock, seconds: float) -> types.SimpleNamespace:
    """MPI's, done after some seconds."""
    end = clock.now + seconds

    def done() -> bool:
        clock.looks += 1
        return clock.now >= end

    return types.SimpleNamespace(Test=done)


def link_of(clock: Clock, seconds: float) -> MpiLink:
    """Of one rank, whose collectives take some seconds each."""

    def gather(sent: np.ndarray, found: Any) -> types.SimpleNamespace:
        (found if isinstance(found, np.ndarray) else found[0])[:] = sent
        return request_of(clock, seconds)

    world = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Iallgather=gather, Iallgatherv=gather)
    return MpiLink(types.SimpleNamespace(COMM_WORLD=world, BYTE=None))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(distributed, "time", found)
    return found


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 2), (0.002, 60), (1.0, 150), (300.0, 12_200)])
def test_looks_grow_rare_and_end_soon_after(clock: Clock, seconds: float, most: int) -> None:
    """most: looks for both collectives of an exchange."""
    assert link_of(clock, seconds).exchange({"a": [1, 2]}) == [{"a": [1, 2]}]
    assert clock.looks <= most
    assert 2 * seconds <= clock.now <= 2 * (seconds + max(seconds / 8, 1e-4))
    assert clock.now <= 2 * seconds + 0.1001


def test_the_wait_has_an_end(clock: Clock) -> None:
    with pytest.raises(RankError, match="has not opened the engine in time"):
        link_of(clock, 1e9).exchange(1)
    assert 600 < clock.now < 601


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [{0, 2}, {4, 6}]),  # 1 is the sibling of 0, and so on
        ([0, 0, 1, 1, 0, 0, 1, 1], [{0, 4}, {2, 6}]),  # the numbers of a node are no neighbours
        ([None] * 8, [{0, 2}, {4, 6}]),
    ],
)
def test_ranks_divide_cores_node_by_node(
    nodes: list[int | None], shares: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu, node in enumerate(nodes):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        siblings = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
        if node is not None:
            (tmp_path / f"cpu{cpu}/node{node}").mkdir()
    bound: list[set[int]] = []
    monkeypatch.setattr(distributed, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(set(cpus)))
    places = [distributed.RankPlace(engine="e", machine="m", cpus=frozenset(range(8)))] * 2
    for rank, share in enumerate(shares):
        for threads in (None, 2):
            assert distributed.share_cores(places, rank, threads) == threads
            assert bound.pop() == share | {cpu + 1 for cpu in share}, "a core with both of its CPUs"


def test_ranks_that_the_launcher_has_bound_or_that_are_more_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: pytest.fail("they keep what they have"))
    bound = [distributed.RankPlace(engine="e", machine="m", cpus=frozenset({cpu})) for cpu in (0, 1)]
    many = [distributed.RankPlace(engine="e", machine="m", cpus=frozenset({0}))] * 3
    for places, expected in ((bound, None), (many, 1)):
        assert distributed.share_cores(places, 1) == expected
        assert distributed.share_cores(places, 1, 4) == 4


@pytest.mark.parametrize(("ends", "code"), [("true", 1), ("exit 3", 3), ("kill -9 $$", 137)])
def test_a_launcher_that_ends_by_itself_has_failed(ends: str, code: int) -> None:
    """Also with exit code 0, which Open MPI's has where it has lost another machine."""
    command = [sys.executable, "-I", forward_signals.__file__, "sh", "-c", ends]
    assert subprocess.run(command, timeout=20).returncode == code


def test_a_launcher_that_was_asked_to_end() -> None:
    script = "trap 'exit 0' USR1; echo ready; while :; do sleep 0.01; done"
    command = [sys.executable, "-I", forward_signals.__file__, "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(("how", "works"), [("", 1.5), ("killed", 1.5), ("killed", 0), ("replaced", 1.5)])
def test_a_launcher_that_stands_still_after_its_ranks(how: str, works: float) -> None:
    """It is killed, also where the command that has started it is gone; one whose rank still works is left alone."""
    guarded = """import os, sys
from ingot.runtime import forward_signals
forward_signals._LOOK_SECONDS = 0.3
if %r == "replaced":
    forward_signals.start_guard(os.getpid())
    os.execvp(sys.argv[1], sys.argv[1:])
sys.exit(forward_signals.run(sys.argv[1:]))"""
    launcher = f"""import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = subprocess.Popen(["sleep", "{works}"])
print(os.getpid(), rank.pid, flush=True)
os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
signal.pause()"""
    command = [sys.executable, "-c", guarded % how, sys.executable, "-c", launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found, rank = (Path("/proc") / each for each in process.stdout.readline().split())
        try:
            if how == "killed":
                process.kill()
            while not has_ended(rank):
                assert not has_ended(found)
                time.sleep(0.01)
            _, err = process.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found.name), signal.SIGKILL)
    assert "mpirun did not end after its ranks" in err
    assert process.returncode == (-signal.SIGKILL if how else 128 + signal.SIGKILL)


def test_a_launcher_whose_ranks_run_elsewhere_is_left_alone() -> None:
    """Its only child, which started them on another machine, has ended, and the launcher has noticed."""
    guarded = """import sys
from ingot.runtime import forward_signals
forward_signals._LOOK_SECONDS = 0.1
sys.exit(forward_signals.run(sys.argv[1:]))"""
    command = [sys.executable, "-c", guarded, "sh", "-c", "sleep 0.5; read line; exit 7"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.communicate("go on\n", timeout=20)
    assert process.returncode == 7


@pytest.mark.parametrize("code", [0, 5])
def test_a_launcher_that_drains_nothing(code: int) -> None:
    """Its streams and its exit code are the command's."""
    script = f"read line; echo $line; exit {code}"
    command = [sys.executable, "-I", forward_signals.__file__, forward_signals.END, "sh", "-c", script]
    found = subprocess.run(command, input="a line\n", capture_output=True, text=True, timeout=20)
    assert (found.returncode, found.stdout, found.stderr) == (code, "a line\n", "")


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_a_signal_that_ends_a_launcher(number: int, code: int, said: str, early: bool) -> None:
    """Its command gets SIGTERM. Early: before Python has started, where signals are blocked until it can hear them."""
    script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done"
    command = [sys.executable, "-I", forward_signals.__file__, forward_signals.END, "sh", "-c", script]
    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, forward_signals.SIGNALS)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=block
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not early:
            assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stderr.read() == said
        assert process.wait(20) == code


def has_ended(process: Path) -> bool:
    """Also where nobody has asked for its end."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("quota", "shares"),
    [(0, [{0, 1, 2, 3}, {4, 5, 6, 7}]), (5, [{0, 1}, {4, 5}]), (1, [{0}, {4}]), (9, [{0, 1, 2, 3}, {4, 5, 6, 7}])],
)
def test_ranks_share_the_quota_of_their_container(
    quota: int, shares: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 is in another container of the machine, which has a quota of its own."""
    bound: list[set[int]] = []
    monkeypatch.setattr(distributed, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(set(cpus)))
    place = distributed.RankPlace(engine="e", machine="m", cpus=frozenset(range(8)), quota=quota, container=7)
    other = dataclasses.replace(place, cpus=frozenset(range(8, 16)), container=8)
    for rank, share in enumerate(shares):
        assert distributed.share_cores([place, place, other], rank) is None
        assert bound.pop() == share
    assert distributed.share_cores([place, place, other], 2) is None
    assert bound == ([set(range(8, 8 + quota))] if 0 < quota < 8 else [])


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", 0), ("150000 100000", 2), ("200000 100000", 2), ("5000 100000", 1), ("", 0), (None, 0)],
)
def test_quotas_of_containers(text: str | None, quota: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(f"{text}\n")
    monkeypatch.setattr(distributed, "CONTROL_GROUP", tmp_path)
    assert distributed._quota() == quota


def test_files_of_mpich_are_removed_when_all_ranks_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, which this process has mapped, and no other's."""
    monkeypatch.setattr(distributed, "_MPICH_FILES", str(tmp_path / "mpich_shm_"))
    own, other = (tmp_path / f"mpich_shm_{number}" for number in range(2))
    for path in (own, other):
        path.write_bytes(bytes(4096))
    with own.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        link_of(Clock(), 0.0).exchange("here")
    assert [path.exists() for path in (own, other)] == [False, True]


def test_a_small_dev_shm_is_refused_before_mpich_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would kill its ranks. Open MPI needs no room there."""
    free = [2047, 2048]
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=free.pop(0), f_frsize=4096))
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(CapacityError, match=r"/dev/shm(.|\n)*8 MiB for 2 ranks(.|\n)*got: 8.0 MiB(.|\n)*larger"):
        distributed.find_link.__wrapped__()
    distributed._require_room()
    assert not free
