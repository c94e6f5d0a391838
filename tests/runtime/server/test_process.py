"""`ingot serve` as a process: signals, and what it says when it starts."""

import concurrent.futures
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ingot.cli.app import run
from ingot.configs.serve import ServeConfig
from ingot.runtime.server.metrics import Metrics
from ingot.runtime.server.request_log import RequestLog
from ingot.runtime.server.serve import set_up_logs
from tests.runtime.server.served import ServeProcess, eventually

pytestmark = pytest.mark.native
LONG = {"prompt": "The prince", "max_tokens": 160, "ignore_eos": True, "temperature": 0}


@pytest.mark.slow
def test_sigterm_under_load_drains(engine: Path) -> None:
    open_to_all = ["--host", "0.0.0.0", "--chat_template", "chatml", "--log_json", "--drain_timeout", "120"]
    longer = {**LONG, "max_tokens": 500, "n": 2}  # no machine is through with them before the signal
    with ServeProcess(engine, open_to_all) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=longer, timeout=150) for _ in range(12)]
        metrics = f"{server.url}/metrics"
        assert eventually(lambda: "ingot_requests_running 24.0" in httpx.get(metrics).text)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        late = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert late.headers["retry-after"] == "120"
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        answers = [one.result() for one in running]
        assert server.wait() == 0
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [1000] * 12
    assert '"status": 200' in server.err
    assert "may use the engine: no --api_key is set" in server.err
    assert "no chat template" not in server.err
    assert "Traceback" not in server.err


@pytest.mark.slow
def test_what_does_not_end_in_time_is_cut_short(engine: Path) -> None:
    options = ["--drain_timeout", 0.2, "--debug_hooks"]
    with ServeProcess(engine, options) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        httpx.post(f"{server.url}/debug/stall", json={"seconds": 1})
        cut = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
        assert eventually(lambda: "ingot_requests_waiting 1.0" in httpx.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert cut.result().json()["error"]["code"] == "shutting_down"
        assert server.wait() == 0
    assert "requests cut short, because they did not end within --drain_timeout: " in server.err


@pytest.mark.slow
def test_a_second_signal_ends_at_once(engine: Path) -> None:
    with ServeProcess(engine) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        long = {**LONG, "max_tokens": 500, "n": 16, "stream": True}
        cut = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=long, timeout=60) for _ in range(4)]
        assert eventually(lambda: "ingot_requests_running 64.0" in httpx.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        for one in cut:
            assert '"code":"shutting_down"' in one.result().text.rstrip().rsplit("\n", 1)[-1]
    assert "Traceback" not in server.err


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_full_log_disk_ends_nothing_and_a_closed_terminal_drains(engine: Path) -> None:
    port = free_port()
    # below nohup SIGHUP is ignored, and the server would leave it so
    start = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from ingot.cli import main; main()"
    command = [sys.executable, "-c", start, "serve", "--engine_dir", str(engine), "--port", str(port)]
    with open("/dev/full", "w") as full, concurrent.futures.ThreadPoolExecutor() as pool:
        server = subprocess.Popen([*command, "--host", "0.0.0.0", "--drain_timeout", "60"], stderr=full)
        try:
            url = f"http://127.0.0.1:{port}"
            assert eventually(lambda: server.poll() is not None or is_up(url))
            assert server.poll() is None, "it ended where it could not write"
            body = {**LONG, "max_tokens": 300, "n": 8}
            running = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            assert eventually(lambda: "ingot_requests_running 8.0" in httpx.get(f"{url}/metrics").text)
            server.send_signal(signal.SIGHUP)
            assert running.result().json()["usage"]["completion_tokens"] == 2400
            assert server.wait(20) == 0
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [([], True), (["--log_level", "warning"], False), (["--no_log_requests"], False), (["--log_level", "debug"], True)],
)
def test_request_lines_follow_the_options(
    options: list[str], words: bool, engine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the command: which lines there are, whatever the engine does."""
    seen: list[ServeConfig] = []

    def serve(directory: Path, open_runner: object, config: ServeConfig, *_: object) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("ingot.runtime.server.serve.serve", serve)
    assert run(["serve", "--engine_dir", str(engine), *options]) == 0
    (config,) = seen
    logger, root = logging.getLogger("ingot"), logging.getLogger()
    before = logger.level, root.level, root.handlers, logging.getLogger("uvicorn.error").level
    try:
        set_up_logs(config.log_level, as_json=True)
        metrics = Metrics()
        log = RequestLog(metrics, lines=config.log_requests)
        log.note("done", route="/x", status=200, request_id="r", fields={})
        logging.getLogger("ingot.runtime").warning("a step failed")
        logging.getLogger("uvicorn.error").warning("noise")
    finally:
        logger.setLevel(before[0])
        root.setLevel(before[1])
        root.handlers = before[2]
        logging.getLogger("uvicorn.error").setLevel(before[3])
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["done"] * words + ["a step failed"]
    assert b'ingot_requests_total{route="/x",status="200"} 1.0' in metrics.text(), "counted all the same"


@pytest.fixture
def nohup() -> Iterator[None]:
    """Processes that start meanwhile ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("nohup")
def test_a_stopped_process_is_not_ready_and_comes_back(engine: Path) -> None:
    with ServeProcess(engine) as server:
        server.process.send_signal(signal.SIGHUP)
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        server.process.send_signal(signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{server.url}/health/ready", timeout=0.5)
        server.process.send_signal(signal.SIGCONT)
        assert eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        begin = time.monotonic()
    assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_what_is_said_at_the_start(engine: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\none\n  # theirs\nzw\u00f6lf\n", encoding="utf-8-sig")
    names = ["--served_model_name", "a, b", "--served-model-name", "c"]
    with ServeProcess(engine, ["--api_key_file", keys, *names]) as server:
        assert "anybody" not in server.err
        assert "the engine has no chat template: chats use ChatML" in server.err
        taken = server.url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "ingot", "serve", "--engine_dir", str(engine), "--port", taken]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert "choose another --host or --port" in second.stderr
        assert "got: address already in use" in second.stderr
        assert "Errno" not in second.stderr
        assert "leaked" not in second.stderr
        for key in ("zw\u00f6lf".encode(), "zw\u00f6lf".encode("latin-1"), b"one"):
            answer = httpx.get(f"{server.url}/v1/models", headers={b"authorization": b"Bearer " + key})
            assert [model["id"] for model in answer.json()["data"]] == ["a", "b", "c"]
        for key in (b"# ours", b"# theirs", b"zwolf"):
            answer = httpx.get(f"{server.url}/v1/models", headers={b"authorization": b"Bearer " + key})
            assert answer.status_code == 401
        assert eventually(lambda: "status=401" in server.err), "its lines come by another thread"
        assert "anybody" not in server.err
