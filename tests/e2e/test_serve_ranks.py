"""`ingot serve` of an engine whose layers are divided among stages: streams, clients that leave, a lost stage."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from ingot.runtime.distributed import find_mpirun
from tests.runtime.mpich import is_mpich
from tests.runtime.server.served import ServeProcess, eventually, serving_engine

MPIRUN = find_mpirun()
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIRUN is None, reason="needs mpi4py and mpirun"
)
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("stages")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "c"))
    for name, stages in (("whole", 1), ("e", 2)):
        build(BuildConfig(target="cpu", pp_size=stages, autotune=False), work / "c", work / name)
    return work / "e"


@pytest.fixture(scope="module")
def stages(engine: Path) -> Iterator[ServeProcess]:
    with ServeProcess(engine, ("--threads", 1, "--drain_timeout", 5)) as server:
        yield server


def asked(number: int, **more: Any) -> dict[str, Any]:
    prompt = [3 + (7 * number + place * place) % 400 for place in range(20 + 9 * number)]
    return {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "seed": number, **more}


def tokens_of(text: str) -> list[int]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [token for line in lines for choice in json.loads(line)["choices"] for token in choice["token_ids"]]


def ranks_of(command: "subprocess.Popen[str]") -> dict[int, int]:
    """Rank → process, of those that mpirun has started, which a child of the command is: itself, or its proxy."""
    parents: dict[int, int] = {}
    ranks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    for process, parent in parents.items():
        if command.pid in (above := parents.get(parent), parents.get(above or 0)):
            with contextlib.suppress(OSError, KeyError):  # it has ended, or is a child that is not yet a rank
                given = (Path("/proc") / str(process) / "environ").read_text().split("\0")
                names = dict(each.partition("=")[::2] for each in given)
                ranks[int(names["OMPI_COMM_WORLD_RANK" if "OMPI_COMM_WORLD_RANK" in names else "PMI_RANK"])] = process
    return ranks


@pytest.mark.slow
def test_streams_have_the_tokens_of_one_rank(engine: Path, stages: ServeProcess) -> None:
    """Six at once, so that both stages work at the same time: greedy, seeded, two sequences of a prompt."""
    bodies = [asked(number, temperature=(0.0, 0.8)[number % 2], stream=True) for number in range(6)]
    bodies.append(asked(6, temperature=0.9, n=2))
    with serving_engine(engine.with_name("whole")) as whole:
        expected = [httpx.post(f"{whole.url}{PATH}", json=each, timeout=60) for each in bodies]
    found: list[Any] = [None] * len(bodies)

    def ask(place: int) -> None:
        found[place] = httpx.post(f"{stages.url}{PATH}", json=bodies[place], timeout=60)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, other in zip(found[:-1], expected[:-1], strict=True):
        assert tokens_of(mine.text) == tokens_of(other.text)
        assert len(tokens_of(mine.text)) == 24
    assert found[-1].json()["choices"] == expected[-1].json()["choices"]


def running(server: ServeProcess) -> int:
    """Sequences that hold blocks or wait."""
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    names = ("ingot_requests_running ", "ingot_requests_waiting ", "ingot_blocks_used ")
    return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.startswith(names))


@pytest.mark.slow
def test_clients_that_leave(stages: ServeProcess) -> None:
    body = asked(0, temperature=0, stream=True, max_tokens=400)
    for lines in (0, 3):
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", f"{stages.url}{PATH}", json=body) as stream:
            for _ in zip(range(lines), stream.iter_lines(), strict=False):
                pass
    named = {"X-Request-Id": "long"}
    with httpx.stream("POST", f"{stages.url}{PATH}", json=body, headers=named, timeout=60) as stream:
        rest = stream.iter_lines()
        next(rest)
        assert httpx.post(f"{stages.url}/v1/requests/long/cancel").status_code in (200, 404)
        assert len(list(rest)) < 2 * 400
    assert eventually(lambda: running(stages) == 0, 20)
    assert httpx.get(f"{stages.url}/health").status_code == 200


@pytest.mark.slow
def test_a_stage_that_dies(engine: Path) -> None:
    """The stream ends with an error, /health tells the lost rank, the command ends; nothing is left behind."""
    before = set(os.listdir("/dev/shm"))
    with ServeProcess(engine, ("--threads", 1)) as server:
        ranks = ranks_of(server.process)
        assert sorted(ranks) == [0, 1]
        body = asked(2, temperature=0, stream=True, max_tokens=400)
        # The launcher of MPICH kills the other ranks before they can say anything.
        cut, told = (httpx.RemoteProtocolError,) if is_mpich() else (), ""
        with contextlib.suppress(*cut), httpx.stream("POST", f"{server.url}{PATH}", json=body, timeout=60) as stream:
            rest = stream.iter_lines()
            next(rest)
            os.kill(ranks[1], signal.SIGKILL)
            began = time.monotonic()
            told = "\n".join(rest)
        assert time.monotonic() - began < 10
        if not cut and "[DONE]" not in told:  # else it ended before
            assert "rank 1 has ended" in told
        with contextlib.suppress(httpx.TransportError):  # mpirun may have ended the process already
            found = httpx.get(f"{server.url}/health", timeout=5)
            assert (found.status_code, "rank 1" in found.text) == (503, True)
        assert server.wait(30) != 0
        assert is_mpich() or "rank 1" in server.err
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), 10)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.fixture
def heard() -> Iterator[None]:
    """Processes that start meanwhile hear SIGHUP, also below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_signals_drain_all_ranks(number: signal.Signals, engine: Path, heard: None) -> None:
    """The stream that runs has its end, and the command the exit code 0."""
    with ServeProcess(engine, ("--threads", 1, "--drain_timeout", 20)) as server:
        ranks = ranks_of(server.process)
        with httpx.stream("POST", f"{server.url}{PATH}", json=asked(3, stream=True), timeout=60) as stream:
            rest = stream.iter_lines()
            next(rest)
            server.process.send_signal(number)
            assert "[DONE]" in "\n".join(rest)
        assert server.wait(30) == 0
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), 10)


def looks_after(process: int, number: signal.Signals) -> bool:
    """Whether the process ignores or catches the signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return any(int(status[each], 16) >> (number - 1) & 1 for each in ("SigIgn", "SigCgt"))


@pytest.mark.slow
def test_a_signal_while_the_ranks_open_the_engine_ends_them(engine: Path) -> None:
    """The moment from which signals reach the ranks is long before the server listens: none is lost meanwhile."""
    command = [sys.executable, "-m", "ingot", "serve", "--engine_dir", str(engine), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert eventually(lambda: len(ranks_of(process)) == 2)
            ranks = ranks_of(process)
            assert eventually(lambda: looks_after(ranks[0], signal.SIGUSR1))
            process.terminate()
            told, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "terminated" in told


@pytest.mark.slow
def test_a_command_that_is_killed_takes_its_ranks_along(engine: Path) -> None:
    with ServeProcess(engine, ("--threads", 1)) as server:
        ranks = ranks_of(server.process)
        server.process.kill()
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()), 20)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_of_ranks_have_cores_of_their_own(engine: Path) -> None:
    """Also where the user says how many there are: each runs on a core of its rank."""
    with ServeProcess(engine, ("--threads", 2)) as server:
        ranks = ranks_of(server.process)
        first, second = (os.sched_getaffinity(ranks[rank]) for rank in (0, 1))
        assert first
        assert second
        assert not first & second
        for rank, cpus in ((0, first), (1, second)):
            tasks = [int(task.name) for task in Path(f"/proc/{ranks[rank]}/task").iterdir()]
            pinned = [found for task in tasks if len(found := os.sched_getaffinity(task)) == 1]
            assert pinned
            assert set().union(*pinned) <= cpus
