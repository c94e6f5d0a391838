"""`ingot serve` as a process: signals, and what it says when it starts."""

import concurrent.futures
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.runtime.server.served import ServeProcess, eventually

pytestmark = pytest.mark.native
LONG = {"prompt": "The prince", "max_tokens": 160, "ignore_eos": True, "temperature": 0}


def test_sigterm_under_load_drains(engine: Path) -> None:
    open_to_all = ["--host", "0.0.0.0", "--chat_template", "chatml", "--log_json"]
    longer = {**LONG, "max_tokens": 500, "n": 5}  # no machine is through with them before the signal
    with ServeProcess(engine, open_to_all) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=longer, timeout=60) for _ in range(12)]
        metrics = f"{server.url}/metrics"
        assert eventually(lambda: "ingot_requests_running 60.0" in httpx.get(metrics).text)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        late = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert int(late.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        answers = [one.result() for one in running]
        assert server.wait() == 0
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [2500] * 12
    assert '"status": 200' in server.err
    assert "anybody may use the engine" in server.err
    assert "no chat template" not in server.err
    assert "Traceback" not in server.err


def test_what_does_not_end_in_time_is_cut_short(engine: Path) -> None:
    options = ["--drain_timeout", 0.2, "--debug_hooks"]
    with ServeProcess(engine, options) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        httpx.post(f"{server.url}/debug/stall", json={"seconds": 1})
        cut = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
        assert eventually(lambda: "ingot_requests_waiting 1.0" in httpx.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        assert cut.result().json()["error"]["code"] == "shutting_down"
        assert server.wait() == 0
    assert "cut short" in server.err


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


def test_a_stopped_process_is_not_ready_and_comes_back(engine: Path) -> None:
    with ServeProcess(engine) as server:
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


def test_what_is_said_at_the_start(engine: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    names = ["--served_model_name", "a", "--served-model-name", "b"]
    with ServeProcess(engine, ["--api_key_file", keys, *names]) as server:
        assert "anybody" not in server.err
        assert "the engine has no chat template: chat completions use chatml" in server.err
        taken = server.url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "ingot", "serve", "--engine_dir", str(engine), "--port", taken]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert "already in use" in second.stderr
        assert "choose another --host or --port" in second.stderr
        assert "leaked" not in second.stderr
        answer = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer two"})
        assert [model["id"] for model in answer.json()["data"]] == ["a", "b"]
