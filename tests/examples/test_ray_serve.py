"""examples/ray_serve: the replica alone, with a stand-in for Ray, and the application in Ray where Ray is installed."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
    return work / "e1"


def test_a_replica_has_the_cores_of_its_ranks(app: ModuleType) -> None:
    manifest = SimpleNamespace(ranks=4, limits=SimpleNamespace(max_batch_size=16))
    given = app.Arguments(engine_dir="/e", cores=6, max_replicas=3, options="--log_json --drain_timeout 5")
    with mock.patch.object(app, "read_manifest", return_value=manifest):
        made = app.app(given)
    assert made.asked["placement_group_bundles"] == [{"CPU": 24}], "one bundle: one machine"
    assert made.asked["ray_actor_options"] == {"num_cpus": 24}
    assert made.asked["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 16}
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
        replica.server.kill()
        replica.server.wait()
        assert (await replica(request("/v1/completions", ASKED))).status_code == 503
        with pytest.raises(httpx.TransportError):
            await replica.check_health()
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


class RayApplication:
    """The application in Ray: two replicas of an engine at /, and one of an engine of two ranks at /ranks."""

    def __init__(self, work: Path, engine: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log, self.paths = f"http://127.0.0.1:{port}", work / "log", ["/"]
        command = [sys.executable, "-m", "tests.programs.ray_replicas", "--port", port, "--engine", "/", engine, 2]
        if importlib.util.find_spec("mpi4py") is not None and find_mpirun() is not None:
            self.paths.append("/ranks")
            command += ["--engine", "/ranks", engine.with_name("e2"), 1]
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
    assert eventually(lambda: not servers(engine) | servers(engine.with_name("e2")), 60), "Ray leaves servers behind"


@pytest.mark.slow
def test_ray_has_two_replicas_that_stream(in_ray: RayApplication, engine: Path) -> None:
    with serving_engine(engine) as served:
        expected = httpx.post(f"{served.url}/v1/completions", json=ASKED, timeout=60).json()["choices"][0]["text"]
    for path in in_ray.paths:
        url = f"{in_ray.url}{path.rstrip('/')}/v1/completions"
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
def test_ray_replaces_a_replica_without_a_server(in_ray: RayApplication, engine: Path) -> None:
    """Meanwhile the other replica answers, and clients that try again have their answer."""
    before = servers(engine)
    os.kill(min(before), signal.SIGKILL)
    url = f"{in_ray.url}/v1/completions"

    def codes(count: int) -> set[int]:
        return {httpx.post(url, json=ASKED, timeout=60).status_code for _ in range(count)}

    found = codes(8)
    assert found <= {200, 503}
    assert 200 in found
    assert eventually(lambda: len(servers(engine)) == 2 and servers(engine) != before, 300)
    assert eventually(lambda: codes(6) == {200}, 60)
