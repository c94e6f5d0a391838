"""The page at /: what a person sees and does, in headless Chromium through its driver."""

import dataclasses
import json
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

pytestmark = pytest.mark.native
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element in WebDriver's JSON


class Browser:
    """The few commands of WebDriver that the tests need."""

    def __init__(self, port: int, profile: str) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        assert eventually(self._is_up, 20)
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
        ]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def open(self, url: str) -> None:
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._post(f"{self._session}/execute/sync", {"script": script, "args": []})

    def prefer(self, scheme: str) -> None:
        """light or dark, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._post(f"{self._session}/goog/cdp/execute", command)

    def text(self, selector: str) -> str:
        return str(self.run(f"return document.querySelector({selector!r})?.textContent ?? ''"))

    def write(self, selector: str, text: str) -> None:
        self._post(f"{self._session}/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._post(f"{self._session}/element/{self._find(selector)}/click", {})

    def complaints(self) -> list[str]:
        """What the console says in red."""
        entries = self._post(f"{self._session}/se/log", {"type": "browser"})
        return [
            entry["message"] for entry in entries if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
        ]

    def close(self) -> None:
        self._http.delete(self._session)
        self._http.close()

    def _is_up(self) -> bool:
        try:
            return bool(self._http.get("/status").json()["value"]["ready"])
        except httpx.TransportError:
            return False

    def _find(self, selector: str) -> str:
        return str(self._post(f"{self._session}/element", {"using": "css selector", "value": selector})[ELEMENT])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        value = self._http.post(path, json=body).json()["value"]
        assert not (isinstance(value, dict) and "error" in value), value
        return value


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("needs chromium and chromedriver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(port, profile)
        try:
            yield browser
        finally:
            browser.close()
            process.terminate()
            process.wait(20)


@pytest.mark.slow
def test_chat_numbers_and_cancel(served: Served, browser: Browser) -> None:
    browser.open(served.url)
    assert eventually(lambda: browser.text("#model") == "tiny" and browser.text("#ready") == "ready", 10)
    assert served.runner.engine.manifest.target in browser.text("#engine")
    assert browser.text("#blocks_total").replace(",", "") == str(served.runner.stats()["blocks_total"])
    browser.run("document.querySelector('#max_tokens').value = 12; document.querySelector('#temperature').value = 0")
    browser.write("#prompt", "Tell me of the <b>prince</b>")
    browser.click("#send")
    assert eventually(lambda: "12 tokens, length" in browser.text(".assistant .note"), 10)
    assert browser.text(".user") == "Tell me of the <b>prince</b>", "text is text"
    messages = [{"role": "user", "content": "Tell me of the <b>prince</b>"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    with served.http() as http:
        expected = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert browser.text(".assistant span") == expected
    assert float(browser.text("#speed")) > 0
    assert float(browser.text("#ttft")) > 0
    browser.run("document.querySelector('#max_tokens').value = 300; document.querySelector('#forget').click()")
    assert browser.text(".assistant") == ""
    with served.http() as http:
        http.post("/debug/stall", json={"seconds": 2})
    browser.write("#prompt", "And then?")
    browser.click("#send")
    assert eventually(lambda: browser.text("#requests_running") == "2" or browser.text("#requests_waiting") == "1")
    browser.click("#cancel")
    assert eventually(lambda: "stopped" in browser.text(".assistant .note"))
    assert eventually(served.is_empty)
    assert browser.complaints() == []
    browser.run("document.querySelector('#max_tokens').value = 1e6; document.querySelector('#forget').click()")
    browser.write("#prompt", "Too much")
    browser.click("#send")
    assert eventually(lambda: "max_seq_len" in browser.text(".error"))
    assert browser.run("return conversation.length") == 0, "what failed is not sent again"


def test_log_probabilities_where_the_pointer_is(served: Served, browser: Browser) -> None:
    browser.open(served.url)
    assert eventually(lambda: browser.text("#model") == "tiny", 10)
    titles = "return [...document.querySelectorAll('.assistant i')].map((each) => each.title)"
    browser.run("document.querySelector('#max_tokens').value = 8; document.querySelector('#temperature').value = 0")
    browser.write("#prompt", "Once")
    browser.click("#send")
    assert eventually(lambda: "8 tokens" in browser.text(".assistant .note"), 10)
    messages = [{"role": "user", "content": "Once"}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    with served.http() as http:
        choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    shown = "\n".join(browser.run(titles)).splitlines()
    assert len(shown) == 8 * 6, "every token, and five that could have stood there"
    for line, entry in zip(shown[::6], choice["logprobs"]["content"], strict=True):
        assert line.startswith(json.dumps(entry["token"], ensure_ascii=False))
        assert line.endswith(f"({entry['logprob']:.2f})")
    browser.run("document.querySelector('#forget').click(); document.querySelector('#logprobs').click()")
    browser.write("#prompt", "Once")
    browser.click("#send")
    assert eventually(lambda: "8 tokens" in browser.text(".assistant .note"), 10)
    assert browser.text(".assistant span") == choice["message"]["content"]
    assert set(browser.run(titles)) == {""}


def test_an_answer_grows_while_it_comes(served: Served, browser: Browser) -> None:
    browser.open(served.url)
    assert eventually(lambda: browser.text("#model") == "tiny", 10)
    browser.run("document.querySelector('#max_tokens').value = 200")
    with served.slowly():
        browser.write("#prompt", "Once")
        browser.click("#send")
        assert eventually(lambda: browser.text(".assistant span") != "", 10)
        assert not browser.run("return document.querySelector('#cancel').hidden"), "it can still be stopped"
        before = len(browser.text(".assistant span"))
        assert eventually(lambda: len(browser.text(".assistant span")) > before, 10)
        browser.click("#cancel")
        assert eventually(lambda: "stopped" in browser.text(".assistant .note"))
    assert eventually(served.is_empty)


def test_dark_and_light(served: Served, browser: Browser) -> None:
    browser.open(served.url)
    colours = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        colours.append(browser.run("return getComputedStyle(document.body).color"))
    assert colours == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]


def test_nothing_comes_from_elsewhere(served: Served, browser: Browser) -> None:
    browser.open(served.url)
    assert eventually(lambda: browser.text("#model") == "tiny", 10)
    loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert loaded
    assert [each for each in loaded if not each.startswith(served.url)] == []


@pytest.mark.slow
def test_a_key_is_asked_for(engine: Path, browser: Browser) -> None:
    with serving_engine(engine, dataclasses.replace(CONFIG, api_keys=("secret",))) as served:
        browser.open(served.url)
        assert eventually(lambda: "API key is missing" in browser.text(".error"))
        browser.run(
            "const key = document.querySelector('#key'); key.value = 'secret'; key.dispatchEvent(new Event('change'))"
        )
        assert eventually(lambda: browser.text("#model") == "tiny")


@pytest.mark.slow
def test_only_its_own_script_runs(served: Served) -> None:
    answer = httpx.get(served.url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)
    assert "http" not in re.sub(r"https?://\S+w3", "", answer.text.split("<script>")[0]), "nothing comes from elsewhere"
    assert len(answer.content) < 20_000
