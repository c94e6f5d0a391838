"""examples/ray_serve: the replica alone, with a stand-in for Ray, and the application in Ray where Ray is installed."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from starlette.requests import Request

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from ingot.runtime.distributed import find_mpirun
from tests.examples.test_deploy import serve_params
from tests.house.project import ROOT
from tests.runtime.server.served import eventually, serving_engine

APP = ROOT / "examples/ray_serve/app.py"
ASKED = {"prompt": "The prince", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@dataclasses.dataclass
class Deployment:
    """What the application asks Ray for, where Ray is not there."""

    replica: Any
    asked: dict[str, Any]
    given: tuple[Any, ...] = ()

    def options(self, **asked: Any) -> "Deployment":
        return Deployment(self.replica, self.asked | asked)

    def bind(self, *given: Any) -> "Deployment":
        return Deployment(self.replica, self.asked, given)


@pytest.fixture
def app() -> ModuleType:
    """The example, over a stand-in for Ray."""
    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    vars(serve).update(deployment=lambda **asked: lambda replica: Deployment(replica, asked), Application=object)
    vars(ray).update(serve=serve)
    spec = importlib.util.spec_from_file_location("app", APP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"ray": ray, "ray.serve": serve}):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("ray")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "c"))
    for ranks in (1, 2):
        build(BuildConfig(target="cpu", sum_parts=2, tp_size=ranks, autotune=False), work / "c", work / f"e{ranks}")
    build(BuildConfig(target="cpu", max_batch_size=2, autotune=False), work / "c", work / "small")
    return work / "e1"


def test_a_replica_has_the_cores_of_its_ranks(app: ModuleType) -> None:
    manifest = SimpleNamespace(ranks=4, limits=SimpleNamespace(max_batch_size=16))
    given = app.Arguments(
        engine_dir="/e", cores=6, max_replicas=3, upscale_delay_s=7, options="--log_json --drain_timeout 5"
    )
    with mock.patch.object(app, "read_manifest", return_value=manifest):
        made = app.app(given)
    assert made.asked["placement_group_bundles"] == [{"CPU": 24}], "one bundle: one machine"
    assert made.asked["ray_actor_options"] == {"num_cpus": 24}
    assert made.asked["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_ongoing_requests": 16,
        "upscale_delay_s": 7,
        "downscale_delay_s": 600,
    }
    params = serve_params(*made.given)
    assert (str(params["engine_dir"]), params["threads"], params["drain_timeout"]) == ("/e", 6, 5)
    assert made.asked["graceful_shutdown_timeout_s"] > serve_params(["--engine_dir", "/e"])["drain_timeout"]


def request(path: str, body: Mapping[str, object]) -> Request:
    """As Ray gives it to a replica."""
    sent = json.dumps(body).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"ray:8000"), (b"content-type", b"application/json"), (b"x-request-id", b"mine")],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": sent, "more_body": False}

    return Request(scope, receive)


@pytest.mark.slow
def test_a_replica_hands_requests_on(app: ModuleType, engine: Path) -> None:
    """Whole answers, streams, errors, clients that leave, its health, its end."""
    with serving_engine(engine) as served:
        expected = httpx.post(f"{served.url}/v1/completions", json=ASKED, timeout=60).json()["choices"]

    async def used(replica: Any) -> None:
        await replica.check_health()
        answer = await replica(request("/v1/completions", ASKED))
        found = json.loads(b"".join([part async for part in answer.body_iterator]))
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        assert [each["text"] for each in found["choices"]] == [each["text"] for each in expected]
        assert (await replica(request("/v1/completions", {}))).status_code == 400
        stream = await replica(request("/v1/completions", {**ASKED, "max_tokens": 400, "stream": True}))
        assert b"data: " in await anext(aiter(stream.body_iterator))
        await stream.body_iterator.aclose()  # as where the client has left
        for _ in range(100):
            text = (await replica.client.get("/metrics")).text
            if "ingot_requests_running 0.0" in text and "ingot_blocks_used 0.0" in text:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the request runs on")
        with mock.patch.object(app.os, "_exit") as ended:
            replica.server.kill()
            replica.server.wait()
            assert (await replica(request("/v1/completions", ASKED))).status_code == 503
            with pytest.raises(httpx.TransportError):
                await replica.check_health()
            assert eventually(lambda: ended.called)
        await replica.client.aclose()

    replica = app.Replica.replica(["--engine_dir", str(engine), "--threads", "1"])
    try:
        asyncio.run(used(replica))
    finally:
        replica.__del__()
        replica.server.stderr.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the pipe of a process that has ended
def test_a_replica_without_an_engine_says_so(app: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        app.Replica.replica(["--engine_dir", "nowhere"])


@pytest.mark.parametrize("closing", [False, True])
def test_a_replica_ends_with_its_server(app: ModuleType, closing: bool) -> None:
    """Unless Ray ends it, which waits for the server."""
    replica = SimpleNamespace(server=SimpleNamespace(wait=lambda: -9), closing=closing)
    with mock.patch.object(app.os, "_exit") as ended, mock.patch.object(app.time, "sleep"):
        app.Replica.replica.end_with_server(replica)
    assert [call.args for call in ended.call_args_list] == ([] if closing else [(1,)])


class RayApplication:
    """The application in Ray: at / two replicas of an engine, at /ranks one of an engine of two ranks, and at /small as
    many as are needed, one or two, of an engine for two sequences."""

    def __init__(self, work: Path, engine: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log, self.paths = f"http://127.0.0.1:{port}", work / "log", ["/"]
        command = [sys.executable, "-m", "tests.programs.ray_replicas", "--port", port, "--engine", "/", engine, 2, 2]
        command += ["--engine", "/small", engine.with_name("small"), 1, 2]
        if importlib.util.find_spec("mpi4py") is not None and find_mpirun() is not None:
            self.paths.append("/ranks")
            command += ["--engine", "/ranks", engine.with_name("e2"), 1, 1]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether all replicas answer."""
        assert self.process.poll() is None, self.log.read_text()
        return "ready\n" in self.log.read_text()

    def completions(self, path: str) -> str:
        """Where completions of the application at this path are."""
        return f"{self.url}{path.rstrip('/')}/v1/completions"

    def code(self, path: str) -> int:
        """The status of a short answer."""
        return httpx.post(self.completions(path), json=ASKED, timeout=60).status_code

    def placed(self) -> list[tuple[str, list[float], list[str]]]:
        """Of each replica its path, the cores of its bundles, and their nodes."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith('["/')]

    def close(self) -> None:
        """Let Ray end all that it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=120)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment() -> dict[str, str]:
    """With time for a busy machine. Nothing is sent, and nothing is written for other runs."""
    given = {f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S": "120" for name in ("READY", "HEALTH")}
    given |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0"}
    given |= {"RAY_worker_niceness": "0"}  # all else that runs here comes before processes of niceness 15
    paths = [*(os.path.abspath(path) for path in sys.path if path), str(APP.parent)]
    return {**os.environ, **given, "PYTHONPATH": os.pathsep.join(paths)}


def servers(engine: Path) -> set[int]:
    """Processes of `ingot serve` with this engine."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdecimal() else []
            if "serve" in words and str(engine) in words and "setpriv" not in words:
                found.add(int(entry.name))
    return found


@pytest.fixture(scope="module")
def in_ray(tmp_path_factory: pytest.TempPathFactory, engine: Path) -> Iterator[RayApplication]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    application = RayApplication(tmp_path_factory.mktemp("serve"), engine)
    try:
        assert eventually(application.is_ready, 900), application.log.read_text()
        yield application
    finally:
        application.close()
    engines = [engine.with_name(name) for name in ("e1", "e2", "small")]
    assert eventually(lambda: not set().union(*map(servers, engines)), 60), "Ray leaves servers behind"


@pytest.mark.slow
def test_ray_has_two_replicas_that_stream(in_ray: RayApplication, engine: Path) -> None:
    with serving_engine(engine) as served:
        expected = httpx.post(f"{served.url}/v1/completions", json=ASKED, timeout=60).json()["choices"][0]["text"]
    for path in in_ray.paths:
        url = in_ray.completions(path)
        for _ in range(4):
            whole = httpx.post(url, json=ASKED, timeout=60).json()
            assert whole["choices"][0]["text"] == expected
        with httpx.stream("POST", url, json={**ASKED, "stream": True}, timeout=60) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == expected
        assert httpx.post(url, json={}, timeout=60).status_code == 400
    assert len(servers(engine)) == 2


@pytest.mark.slow
def test_ray_places_all_ranks_of_a_replica_on_one_machine(in_ray: RayApplication) -> None:
    """By Ray's own table. A node of Ray is a machine elsewhere; here are two on this one."""
    placed = in_ray.placed()
    assert [path for path, _, _ in placed if path != "/ranks"] == ["/", "/", "/small"]
    for path, cores, nodes in placed:
        assert cores == [2 if path == "/ranks" else 1]
        assert len(nodes) == 1
    assert {path for path, _, _ in placed} >= set(in_ray.paths)


@pytest.mark.slow
def test_ray_replaces_a_replica_without_a_server(in_ray: RayApplication, engine: Path) -> None:
    """Soon the other replica has all requests, and until then clients that try again have their answer."""
    before = servers(engine)
    os.kill(min(before), signal.SIGKILL)
    found = {in_ray.code("/") for _ in range(8)}
    assert found <= {200, 503}
    assert 200 in found
    assert eventually(lambda: {in_ray.code("/") for _ in range(6)} == {200}, 60)
    assert eventually(lambda: len(servers(engine)) == 2 and not servers(engine) >= before, 300)


@pytest.mark.slow
def test_ray_replaces_a_replica_that_has_lost_a_rank(in_ray: RayApplication, engine: Path) -> None:
    if "/ranks" not in in_ray.paths:
        pytest.skip("needs mpi4py and mpirun")
    before = servers(engine.with_name("e2"))
    os.kill(max(before), signal.SIGKILL)
    assert eventually(lambda: not servers(engine.with_name("e2")) & before, 120)
    assert eventually(lambda: in_ray.code("/ranks") == 200, 300)


def read_stream(url: str, asked: dict[str, Any], all_run: threading.Barrier) -> list[int]:
    """The tokens of a stream until its end, or until it breaks."""
    found: list[int] = []
    with contextlib.suppress(httpx.TransportError), httpx.stream("POST", url, json=asked, timeout=60) as stream:
        for line in stream.iter_lines():
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            for choice in chunk["choices"]:
                first = not found
                found += choice["token_ids"]
                if first:
                    all_run.wait(60)
    return found


@pytest.mark.slow
def test_streams_go_on_at_another_replica(in_ray: RayApplication, engine: Path) -> None:
    """A server is killed while both have streams: all clients get the tokens of streams that do not break."""
    url, before = in_ray.completions("/"), servers(engine)
    assert len(before) == 2
    more = {"temperature": 0.9, "max_tokens": 450, "return_token_ids": True}
    asked = [{**ASKED, **more, "seed": seed} for seed in range(8)]
    whole = [httpx.post(url, json=each, timeout=60).json()["choices"][0]["token_ids"] for each in asked]
    all_run = threading.Barrier(len(asked), action=lambda: os.kill(min(before), signal.SIGKILL))
    with ThreadPoolExecutor(len(asked)) as threads:
        read = list(threads.map(lambda each: read_stream(url, {**each, "stream": True}, all_run), asked))
    broken = [number for number, tokens in enumerate(read) if len(tokens) < 450]
    assert broken, "the server that was killed had no stream"

    def goes_on(number: int) -> bool:
        answer = httpx.post(url, json={**asked[number], "resume_token_ids": read[number]}, timeout=60)
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 200:
            read[number] += answer.json()["choices"][0]["token_ids"]
        return answer.status_code == 200

    for number in broken:
        assert eventually(functools.partial(goes_on, number), 60)
    assert read == whole
    assert eventually(lambda: len(servers(engine)) == 2, 300)


@pytest.mark.slow
def test_ray_adds_a_replica_and_removes_it(in_ray: RayApplication, engine: Path) -> None:
    """No request fails, neither while a replica is added nor while it is removed."""
    small, codes, enough = engine.with_name("small"), set[int](), threading.Event()
    assert len(servers(small)) == 1

    def ask() -> None:
        while not enough.is_set():
            sent = {**ASKED, "max_tokens": 400}
            codes.add(httpx.post(in_ray.completions("/small"), json=sent, timeout=120).status_code)

    with ThreadPoolExecutor(5) as threads:
        for _ in range(5):  # more than two replicas take
            threads.submit(ask)
        try:
            assert eventually(lambda: len(servers(small)) == 2, 300)
        finally:
            enough.set()

    def is_removed() -> bool:
        codes.add(in_ray.code("/small"))
        return len(servers(small)) == 1

    assert eventually(is_removed, 300)
    assert codes == {200}
