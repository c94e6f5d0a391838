"""Once a server listens it needs nothing from the disk: its engine's directory may be moved or deleted."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.runtime.server.served import Served, serving_engine

pytestmark = pytest.mark.native

CALLS: tuple[tuple[str, str, dict[str, object] | None], ...] = (
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/version", None),
    ("GET", "/", None),
    ("GET", "/openapi.json", None),
    ("GET", "/metrics", None),
    ("GET", "/health/ready", None),
    ("GET", "/health/live", None),
    ("POST", "/tokenize", {"prompt": "The prince"}),
    ("POST", "/tokenize", {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/v1/completions", {"prompt": "The prince", "max_tokens": 3, "echo": True, "logprobs": 2}),
    ("POST", "/v1/completions", {"prompt": ["The", "prince"], "max_tokens": 3, "stream": True, "bad_words": ["the"]}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stop": ["x"]}),
)


def call_all(served: Served) -> dict[str, int]:
    """Path → the worst status that it answered."""
    worst: dict[str, int] = {}
    with served.http() as http:
        for method, path, body in CALLS:
            status = http.request(method, path, json=body).status_code
            worst[path] = max(worst.get(path, 0), status)
    return worst


def test_every_route_answers_after_the_engine_is_deleted(engine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    opened: list[str] = []
    listening = False

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event in ("open", "os.listdir", "os.scandir") and str(tmp_path) in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    with serving_engine(copy) as served:
        with served.http() as http:
            created = http.get("/v1/models/tiny").json()["created"]
        assert created == int((copy / "config.json").stat().st_mtime)
        shutil.rmtree(copy)
        listening = True
        assert {path: status for path, status in call_all(served).items() if status != 200} == {}
        with served.http() as http:
            assert http.get("/v1/models/tiny").json()["created"] == created
        listening = False
    assert opened == []
