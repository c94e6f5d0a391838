"""Engines of several ranks: one process for each, started by MPI. The first one leads, the others follow.

    rank 0   HTTP, scheduler, draws ──▶ Session.run ─┬─▶ batch of the step ──▶ every rank computes its share,
    rank 1.. follow: Session.follow ◀────────────────┘                         and meets the others in collectives

MPI starts the processes, ends them together, and says which rank each one is. While an engine opens they tell each
other by `RankLink.exchange` what they have found; after that the sessions themselves meet.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import math
import os
import pickle
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from ingot.engine import read_manifest
from ingot.errors import CapacityError, IngotError, RankError, UsageError, install
from ingot.manifest import MANIFEST_NAME
from ingot.plugins.target import RankLink
from ingot.runtime import forward_signals
from ingot.runtime.memory import CONTROL_GROUP

# What launchers tell the processes that they start: Open MPI and PMIx (Slurm), MPICH and Hydra (PMI).
_STARTED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
# Ranks of one machine share its cores (`share_cores`), and its memory without MPI: what Open MPI keeps in /dev/shm
# would stay there when a rank is killed. Root is the only user of many containers.
_MPIRUN_SETTINGS = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_btl": "self,tcp",
    # A machine that does not answer is noticed before ranks have waited for it (`RuntimeConfig.rank_timeout`). Once a
    # rank has failed, mpirun tells all machines to end, and without these waits for each of them to answer.
    "PRTE_MCA_oob_tcp_keepalive_time": "15",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "3",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_SHM = "/dev/shm"
_MPICH_FILES, _MPICH_BYTES = f"{_SHM}/mpich_shm_", 4 << 20  # of a rank: 3.2 MiB with MPICH 5.0
_OPENING_SECONDS = 600.0  # that ranks wait for each other while they read their weights
_CPUS = Path("/sys/devices/system/cpu")
_LONGEST_SLEEP = 0.05  # seconds between two looks at what another rank says

Said = TypeVar("Said")


class MpiLink:
    """The processes of MPI's COMM_WORLD."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self.count: int = self._world.Get_size()
        self.exit_code = 1  # of the launcher, where this process ends before the others
        if self.count > 1:  # a rank that fails takes all along: they would wait for it, and MPI for them
            atexit.register(self._end_all)

    def exchange(self, said: Any) -> list[Any]:
        """All that the ranks say, in their order. Raises RankError where one of them does not come for ten minutes."""
        data = np.frombuffer(pickle.dumps(said), np.uint8)
        sizes = np.zeros(self.count, np.int64)
        self._wait(self._world.Iallgather(np.array([len(data)], np.int64), sizes))
        heard = np.empty(sizes.sum(), np.uint8)
        self._wait(self._world.Iallgatherv(data, [heard, sizes.tolist(), None, self._mpi.BYTE]))
        self._remove_files()
        return [pickle.loads(each.tobytes()) for each in np.split(heard, np.cumsum(sizes)[:-1])]

    def _remove_files(self) -> None:
        """Those in /dev/shm in which MPICH's ranks meet, and which would stay there when a rank is killed: all ranks
        have opened them by now."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if (name := line.split(maxsplit=5)[-1]).startswith(_MPICH_FILES):
                Path(name).unlink(missing_ok=True)

    def _wait(self, request: Any) -> None:
        """MPI has no wait that ends after a time, and its wait without end keeps a core busy, which the other ranks of
        the machine need while they read their weights. So the request is tested less and less often."""
        begin = time.monotonic()
        while not request.Test():
            if (waited := time.monotonic() - begin) > _OPENING_SECONDS:
                raise RankError("a rank has not opened the engine in time", got=f"nothing in {_OPENING_SECONDS:g} s")
            time.sleep(min(max(waited / 8, 1e-4), _LONGEST_SLEEP))

    def mpi_calls(self, stages: int) -> tuple[int, ...]:
        """Functions of the library that mpi4py has loaded, and communicators that nothing else uses."""
        library = ctypes.CDLL(self._mpi.__file__)
        names = ("MPI_Iallgather", "MPI_Ibcast", "MPI_Isend", "MPI_Irecv", "MPI_Test")
        calls = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
        self._own = self._world.Dup(), self._world.Split(self.rank // (self.count // stages), self.rank)
        return (*calls, *(each.handle for each in self._own), self._mpi.BYTE.handle)

    def leave(self) -> None:
        """From now on this process may end by itself."""
        atexit.unregister(self._end_all)

    def _end_all(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(self.exit_code)


@functools.cache
def find_link() -> MpiLink | None:
    """The processes that MPI has started with this one; None where it has started none. Raises UsageError where mpi4py
    cannot be used, and CapacityError where MPICH has no room."""
    if not any(name in os.environ for name in _STARTED):
        return None
    if not any(name in os.environ for name in _STARTED[:2]):
        _require_room()
    try:
        link = MpiLink(importlib.import_module("mpi4py.MPI"))
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "mpi4py cannot be used, which an engine of several ranks needs", got=str(error), hint=install("mpi")
        ) from error
    return link if link.count > 1 else None


def _require_room() -> None:
    """Raises CapacityError where /dev/shm is too small for MPICH, whose ranks the system would kill without a word."""
    room, ranks = os.statvfs(_SHM), int(os.environ.get("MPI_LOCALNRANKS", "1"))
    if (found := room.f_bavail * room.f_frsize) < (needed := ranks * _MPICH_BYTES):
        raise CapacityError(
            "the ranks of MPICH meet in files that need more room",
            where=_SHM,
            expected=f"{needed >> 20} MiB for {ranks} ranks",
            got=f"{found / (1 << 20):.1f} MiB",
            hint="make it larger, for example with `docker run --shm-size 1g`, or use Open MPI, which needs no room",
        )


def end_with(code: int) -> None:
    """Let the launcher end with this exit code, if this process takes the other ranks along when it ends."""
    with contextlib.suppress(IngotError):  # without a library of MPI no launcher can be told; the command has said so
        if code and (link := find_link()) is not None:
            link.exit_code = code


def require_link(ranks: int, directory: Path) -> MpiLink:
    """Raises UsageError unless MPI has started as many processes as the engine has ranks."""
    link = find_link()
    if link is None or link.count != ranks:
        raise UsageError(
            f"the engine has {ranks} ranks and needs a process for each",
            where=str(directory),
            expected=f"{ranks} processes",
            got="one that MPI has not started" if link is None else f"{link.count} processes",
            hint=f"start this program with mpirun -n {ranks}",
        )
    return link


def find_mpirun() -> str | None:
    """The launcher beside this Python, else that of the PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.is_file() else shutil.which("mpirun")


def start_ranks(engine_dir: Path, ranks: int, *, drains: bool = False) -> NoReturn:
    """Replace this process by mpirun with this command for each rank. Raises UsageError without one.

    drains: signals that end this process reach the ranks as SIGUSR1
    """
    mpirun = find_mpirun()
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            f"the {ranks} ranks of the engine cannot be started",
            where=str(engine_dir),
            expected="mpirun and mpi4py",
            got="no mpirun" if mpirun is None else "no mpi4py",
            hint=install("mpi"),
        )
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "ingot", *sys.argv[1:]]
    print(f"starting {ranks} ranks: {shlex.join(command)}", file=sys.stderr, flush=True)
    settings = {**_MPIRUN_SETTINGS, **(_AS_ROOT if os.geteuid() == 0 else {})}
    command = [sys.executable, "-I", forward_signals.__file__, *([] if drains else [forward_signals.END]), *command]
    signal.pthread_sigmask(signal.SIG_BLOCK, forward_signals.SIGNALS)  # they wait until that program can hear them
    os.execve(command[0], command, {**settings, **os.environ})


def together(link: RankLink, make: Callable[[], Said]) -> list[Said]:
    """What every rank makes, in their order. Where it raises in one rank, it raises in all: none waits for that one."""
    made: tuple[Said] | None = None
    own: IngotError | None = None
    try:
        made = (make(),)
    except IngotError as error:
        own = error
    heard: list[tuple[Said] | str] = link.exchange(str(own) if made is None else made)
    if own is not None:
        raise own
    found: list[Said] = []
    for rank, each in enumerate(heard):
        if isinstance(each, str):
            raise RankError(f"rank {rank} cannot open the engine", got=each)
        found += each
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """What a rank must know of the others before it takes memory and threads.

    engine     hash of the manifest
    machine    equal for processes of one machine
    cpus       that the process may use
    quota      CPUs that the quota of its container pays for, rounded up; 0: all
    container  equal for processes of one machine that share a quota
    """

    engine: str
    machine: str
    cpus: frozenset[int]
    quota: int = 0
    container: int = 0

    @classmethod
    def here(cls, directory: Path) -> "RankPlace":
        """This process. Raises EngineError where the directory is not an engine."""
        read_manifest(directory)
        digest = hashlib.sha256((directory / MANIFEST_NAME).read_bytes()).hexdigest()
        boot = Path("/proc/sys/kernel/random/boot_id")
        machine = boot.read_text().strip() if boot.is_file() else os.uname().nodename
        return cls(
            engine=digest,
            machine=machine,
            cpus=frozenset(os.sched_getaffinity(0)),
            quota=_quota(),
            container=CONTROL_GROUP.stat().st_ino if CONTROL_GROUP.exists() else 0,
        )


def find_places(directory: Path, link: RankLink) -> list[RankPlace]:
    """Asks every rank, and gives their answers in order. Raises RankError where they have different engines."""
    places = together(link, lambda: RankPlace.here(directory))
    for rank, place in enumerate(places):
        if place.engine != places[0].engine:
            raise RankError(
                "the ranks have different engines",
                where=str(directory),
                expected=f"manifest {places[0].engine[:16]} of rank 0",
                got=f"manifest {place.engine[:16]} of rank {rank}",
                hint="give all ranks the same engine",
            )
    return places


def local_ranks(places: Sequence[RankPlace], rank: int) -> list[int]:
    """Ranks of this rank's machine, in order, itself included."""
    return [other for other, place in enumerate(places) if place.machine == places[rank].machine]


def share_memory(places: Sequence[RankPlace], wanted: str) -> bool:
    """Whether all ranks meet in shared memory, else by MPI. wanted: `RuntimeConfig.collectives`. Raises RankError."""
    one = len({place.machine for place in places}) == 1
    if wanted == "shm" and not one:
        raise RankError("the ranks cannot share memory", got="several machines", hint="leave --collectives shm out")
    return one and wanted != "mpi"


def share_cores(places: Sequence[RankPlace], rank: int, threads: int | None = None) -> int | None:
    """Keep this process to its own cores, where the launcher gave several ranks the same ones; neighbours together, and
    no more than its part of a container's quota.

    Before the session's threads start. threads: of a rank, where the user says so. Gives those of this rank; None: one
    for each core that it has.
    """
    here, local = places[rank], [places[other] for other in local_ranks(places, rank)]
    same = [other for other in local_ranks(places, rank) if places[other].cpus == here.cpus]
    cores = _cores(here.cpus)
    if len(cores) < len(same):
        return threads or 1
    at = same.index(rank)
    own = cores[len(cores) * at // len(same) : len(cores) * (at + 1) // len(same)]
    if here.quota:
        own = own[: max(1, here.quota // sum(other.container == here.container for other in local))]
    if len(own) < len(cores):
        os.sched_setaffinity(os.getpid(), {cpu for core in own for cpu in core})
    return threads


def _quota() -> int:
    """See `RankPlace`: "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    try:
        quota, period = map(int, (CONTROL_GROUP / "cpu.max").read_text().split())
    except (OSError, ValueError):  # no cgroup v2, or its quota is "max"
        return 0
    return max(1, math.ceil(quota / period))


def _cores(cpus: frozenset[int]) -> list[frozenset[int]]:
    """CPUs that share a core, node by node, and there in the order of the first of each. So ranks have as few memory
    nodes each as can be, also where neighbouring numbers are of different nodes."""
    found: dict[str, set[int]] = {}
    for cpu in sorted(cpus, key=lambda cpu: (_node(cpu), cpu)):
        siblings = _CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        found.setdefault(siblings.read_text() if siblings.is_file() else str(cpu), set()).add(cpu)
    return [frozenset(each) for each in found.values()]


def _node(cpu: int) -> int:
    """The memory node of a CPU: a link beside its topology has its number. 0 where the system tells none."""
    nodes = (link.name.removeprefix("node") for link in (_CPUS / f"cpu{cpu}").glob("node*"))
    return next((int(number) for number in nodes if number.isdecimal()), 0)
