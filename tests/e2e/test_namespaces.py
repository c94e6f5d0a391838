"""Servers and ranks on machines of their own, network namespaces: links that are slow, lose packets, or break."""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import json
import os
import random
import re
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from tests.examples.test_deploy import leader_script
from tests.runtime.server.served import ServeProcess, eventually, serving_engine

pytestmark = [pytest.mark.slow, pytest.mark.long]

PATH = "/v1/completions"
_CLONE_NEWNET, _TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x40000000, 0x400454CA, 0x2, 0x1000
Found = TypeVar("Found")


class Host:
    """A machine: a network, and a name."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def prefix(self) -> list[str]:
        """What a command line begins with to run there."""
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname $0; exec "$@"', self.name]

    def within(self, function: Callable[[], Found]) -> Found:
        """Call a function with this machine's network: in a thread, as a network belongs to a thread."""

        def call() -> Found:
            with open(f"/run/netns/{self.name}") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return function()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()

    def processes(self) -> list[int]:
        """Those that run there."""
        return [int(each) for each in run("ip", "netns", "pids", self.name).split()]


class Network:
    """Two machines, and a link between them: a program that hands frames on, after `delay` seconds, but for a share
    `loss` of them, and none where it is `broken`."""

    def __init__(self) -> None:
        mark = f"ingot{os.getpid() % 100000}"
        self.hosts = Host(f"{mark}a", "10.77.0.1"), Host(f"{mark}b", "10.77.0.2")
        self.delay, self.loss, self.broken = 0.0, 0.0, False
        self._taps: list[int] = []
        self._threads: list[threading.Thread] = []
        self._ends = False

    def make(self) -> None:
        for host in self.hosts:
            run("ip", "netns", "add", host.name)
            self._taps.append(host.within(open_tap))
            run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "tap0")
            for device in ("lo", "tap0"):
                run("ip", "-n", host.name, "link", "set", device, "up")
        for source, target in (self._taps, self._taps[::-1]):
            self._threads.append(threading.Thread(target=self._carry, args=(source, target), daemon=True))
            self._threads[-1].start()

    def become(self, *, delay: float = 0.0, loss: float = 0.0, broken: bool = False) -> None:
        """From now on."""
        self.delay, self.loss, self.broken = delay, loss, broken

    def lose(self) -> None:
        """A few packets from now on, and be slow."""
        self.become(delay=0.008, loss=0.02)

    def _carry(self, source: int, target: int) -> None:
        drawn = random.Random(source)
        waiting = deque[tuple[float, bytes]]()
        while not self._ends:
            until = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else 0.1
            if select.select([source], [], [], until)[0]:
                frame = os.read(source, 1 << 16)
                if not self.broken and drawn.random() >= self.loss:
                    waiting.append((time.monotonic() + self.delay, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                os.write(target, waiting.popleft()[1])

    def remove(self) -> None:
        """And the processes that are left."""
        self._ends = True
        for thread in self._threads:
            thread.join()
        for tap in self._taps:
            os.close(tap)
        for host in self.hosts:
            with contextlib.suppress(OSError):
                for process in host.processes():
                    os.kill(process, signal.SIGKILL)
                run("ip", "netns", "del", host.name)


def open_tap() -> int:
    """A network device `tap0` whose frames this process reads and writes."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"tap0", _IFF_TAP | _IFF_NO_PI))
    return tap


def run(*command: str) -> str:
    """What it prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


@pytest.fixture
def network() -> Iterator[Network]:
    made, before = Network(), set(os.listdir("/dev/shm"))
    try:
        made.make()
    except OSError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error}")
    try:
        yield made
        assert eventually(lambda: not any(host.processes() for host in made.hosts), 30), "processes are left"
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        made.remove()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("namespaces")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "c"))
    for name, ranks in (("whole", 1), ("ranks", 2)):
        build(BuildConfig(target="cpu", sum_parts=2, tp_size=ranks, autotune=False), work / "c", work / name)
    return work / "whole"


def asked(number: int, **more: Any) -> dict[str, Any]:
    """A request with a prompt of its own, and a seed."""
    prompt = [random.Random(number).randrange(3, 400) for _ in range(150)]
    drawn = {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    return {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, **drawn, **more}


@pytest.fixture(scope="module")
def expected(engine: Path) -> Callable[..., list[int]]:
    """The tokens of a request on one machine."""
    known: dict[str, list[int]] = {}

    def tokens(body: dict[str, Any]) -> list[int]:
        key = json.dumps(body)
        if key not in known:
            with serving_engine(engine) as served:
                known[key] = post(served.url, body)
        return known[key]

    return tokens


def post(url: str, body: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    found = httpx.post(f"{url}{PATH}", json=body, timeout=120)
    assert found.status_code == 200, found.text
    tokens: list[int] = found.json()["choices"][0]["token_ids"]
    return tokens


def read(url: str, body: dict[str, Any], after: int, then: Callable[[], None]) -> tuple[list[int], str]:
    """The tokens of a stream until it ends or nothing comes for a while, and its last line. then: is called after some
    tokens."""
    tokens: list[int] = []
    last = ""
    timeout = httpx.Timeout(120, read=25)
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{url}{PATH}", json={**body, "stream": True}, timeout=timeout) as stream,
    ):
        for line in filter(None, stream.iter_lines()):
            last = line
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    tokens += choice.get("token_ids") or ()
            if len(tokens) >= after:
                after = 1 << 30
                then()
    return tokens, last


def moved(url: str) -> float:
    """Bytes of keys and values that came from the prefill server."""
    found = re.search(r'ingot_kv_moved_bytes_total\{direction="in"\} (\S+)', httpx.get(f"{url}/metrics").text)
    return float(found[1]) if found else 0.0


def test_prefill_apart_over_links_of_all_kinds(
    network: Network, engine: Path, expected: Callable[..., list[int]]
) -> None:
    """Every answer has its tokens: with keys and values over the link as long as it carries them, else without."""
    first, second = network.hosts
    plain = ("--threads", 1, "--host")
    with ServeProcess(engine, (*plain, first.address, "--role", "prefill"), first.prefix()) as prefill:
        apart = ("--role", "decode", "--prefill_url", prefill.url, "--prefill_min_tokens", 1, "--prefill_timeout", 3)
        with ServeProcess(engine, (*plain, second.address, *apart), second.prefix()) as decode:
            states: list[tuple[str, Callable[[], None], bool]] = [
                ("fast", network.become, True),
                ("lossy", network.lose, True),
                ("broken", lambda: network.become(broken=True), False),
                ("mended", network.become, True),
            ]
            for number, (name, become, carries) in enumerate(states):
                become()
                before = second.within(partial(moved, decode.url))
                for place in (0, 1):
                    body = asked(10 * number + place)
                    found = second.within(partial(post, decode.url, body))
                    assert found == expected(body), name
                if name != "mended":  # a server that has failed is left alone for a while
                    assert (second.within(partial(moved, decode.url)) > before) == carries, name
            for server in (decode, prefill):
                server.process.terminate()
                assert server.wait(60) == 0


def test_a_stream_that_a_broken_link_ends_goes_on_elsewhere(
    network: Network, engine: Path, expected: Callable[..., list[int]]
) -> None:
    first, second = network.hosts
    options = ("--threads", 1, "--write_timeout", 5, "--host")
    with (
        ServeProcess(engine, (*options, first.address), first.prefix()) as far,
        ServeProcess(engine, (*options, second.address), second.prefix()) as near,
    ):
        for number in (0, 1):
            body = asked(number, max_tokens=300)
            network.become(delay=0.03)  # so that most tokens are under way when the link breaks
            tokens, _ = second.within(partial(read, far.url, body, 5, lambda: network.become(broken=True)))
            assert 5 <= len(tokens) < 300
            rest = second.within(partial(post, near.url, {**body, "resume_token_ids": tokens}))
            assert tokens + rest == expected(body)
            network.become()
        for server in (near, far):
            server.process.terminate()
            assert server.wait(60) == 0


def test_ranks_of_two_machines(
    network: Network, engine: Path, expected: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Started by the leader of examples/deploy/leaderworkerset.yaml, but for ssh. Over a lossy link tokens stay the
    same; when the link breaks, both machines end within seconds."""
    first = network.hosts[0]
    url = f"http://{first.address}:8000"
    server = start_leader(network, engine.with_name("ranks"), tmp_path)
    try:
        assert eventually(lambda: "serving " in (tmp_path / "log").read_text() or server.poll() is not None, 120)
        assert [rank_of(host) for host in network.hosts] == [["0"], ["1"]], (tmp_path / "log").read_text()
        states: tuple[Callable[[], None], ...] = (network.become, network.lose, network.become)
        for number, become in enumerate(states):
            become()
            for place in (0, 1):
                body = asked(10 * number + place)
                assert first.within(partial(post, url, body)) == expected(body)
        body = asked(1, max_tokens=300)
        tokens, last = first.within(partial(read, url, body, 3, lambda: network.become(broken=True)))
        assert len(tokens) < 300
        assert tokens == expected(body)[: len(tokens)]
        assert "[DONE]" not in last
        assert eventually(lambda: not any(host.processes() for host in network.hosts), 40)
        assert server.wait(10) != 0, "nobody has asked it to end"
        assert "lost communication" in (tmp_path / "log").read_text()
    finally:
        server.kill()
        server.wait()


def start_leader(network: Network, engine: Path, work: Path) -> "subprocess.Popen[bytes]":
    """The command of the leader. ssh is a program that enters the other network."""
    first, second = network.hosts
    (work / "ssh").write_text(f"""#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -x) shift;; -*) shift 2;; *) break;; esac; done
[ "$1" = {first.name}-1.ns ] || exit 255
shift
exec ip netns exec {second.name} unshare --uts sh -c "hostname {second.name}; $*"
""")
    (work / "ingot").write_text(f'#!/bin/sh\nexec {sys.executable} -m ingot "$@" --collectives mpi --rank_timeout 20\n')
    for name in ("ssh", "ingot"):
        (work / name).chmod(0o755)
    (work / "keys").write_text("# none\nkey\n")
    names = f"{first.address} {first.name}.ns {first.name}\n{second.address} {first.name}-1.ns {second.name}\n"
    (work / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    script = leader_script().replace(" /engine ", f" {engine} ").replace(" --api_key_file /keys/keys", "")
    script = script.replace("--threads 8", "--threads 1").replace("--host 0.0.0.0", f"--host {first.address}")
    own = {
        "PATH": f"{work}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "TMPDIR": str(work),
        "LWS_LEADER_ADDRESS": f"{first.name}.ns",
        "LWS_GROUP_SIZE": "2",
        **{f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in (("time", "3"), ("intvl", "1"))},
    }
    mounted = f"mount --bind {work}/hosts /etc/hosts && exec sh -c "
    command = [*first.prefix(), "unshare", "--mount", "sh", "-c", f'{mounted} "$0"', script]
    with (work / "log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own})


def rank_of(host: Host) -> list[str]:
    """Ranks whose processes run there."""
    found = []
    for process in host.processes():
        with contextlib.suppress(OSError):
            given = Path(f"/proc/{process}/environ").read_text().split("\0")
            found += [each.partition("=")[2] for each in given if each.startswith("OMPI_COMM_WORLD_RANK=")]
    return found
