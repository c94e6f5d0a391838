"""What the server refuses, and in which words: pages of other sites, routes that are not there, wrong fields."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.served import CONFIG, Served, serving_engine

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def listing(engine: Path) -> Iterator[Served]:
    """A server that lists the origin of a page."""
    config = dataclasses.replace(CONFIG, cors_origins=("https://chat.example",))
    with serving_engine(engine, config) as served:
        yield served


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://HOST"}, 200),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://HOST", "sec-fetch-site": "same-site"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_browsers_ask_for_pages_of_this_server_alone(
    served: Served, listing: Served, headers: dict[str, str], status: int
) -> None:
    """A text needs no leave of the server to be sent from other pages. A proxy may have changed the Host header."""
    host = served.url.partition("://")[2]
    given = {name: value.replace("HOST", host) for name, value in headers.items()}
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers={**given, "content-type": "text/plain"})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "foreign_origin"
        assert "--cors_origin" in answer.json()["error"]["message"]
        assert httpx.get(f"{served.url}/v1/models", headers=given).status_code == 200
    listed = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    assert httpx.post(f"{listing.url}/v1/completions", content=body, headers=listed).status_code == 200


@pytest.mark.parametrize(
    ("path", "words"),
    [("/rerank", "ranks no documents"), ("/v1/load_lora_adapter", "convert --lora"), ("/v1/completions/", "no slash")],
)
def test_what_is_not_there_has_a_reason(served: Served, path: str, words: str) -> None:
    answer = httpx.post(f"{served.url}{path}", json={})
    assert answer.status_code == 404
    assert words in answer.json()["error"]["message"]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("chat/completions", {"response_format": SCHEMA}, "response_format"),
        ("chat/completions", {"guided_json": {"type": "nope"}}, "guided_json"),
        ("chat/completions", {"structured_outputs": {"json": {"type": "nope"}}}, "structured_outputs"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}},
            "text.format",
        ),
        ("responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
def test_errors_name_the_field_that_was_sent(served: Served, route: str, fields: dict[str, Any], param: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"input": messages} if route == "responses" else {"messages": messages}
    answer = httpx.post(f"{served.url}/v1/{route}", json={**body, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
