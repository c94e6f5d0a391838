"""A decode server has prompts computed by a prefill server: answers, counts and refusals are those of one server."""

import dataclasses
import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.runtime.server.apart import (
    PATH,
    PREFILL,
    SEEDED,
    SIZE,
    answer,
    body,
    computed_tokens,
    decode,
    decoding,
    fetched,
    nothing_leaks,
    offer_of,
    prefill,
    prompt_of,
)
from tests.runtime.server.served import Served, ServeProcess, eventually, serving_engine

pytestmark = pytest.mark.native
__all__ = ["decode", "nothing_leaks", "prefill"]  # fixtures


@pytest.mark.daily(1)
@pytest.mark.parametrize("by", ["shared memory", "http"])
@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0, "logprobs": 3},
        {**SEEDED, "logprobs": 2},
        {**SEEDED, "n": 3},
        {"temperature": 0, "length": SIZE + 1},
    ],
    ids=["greedy", "seeded", "three", "short"],
)
def test_the_answer_of_one_server(
    more: dict[str, Any], by: str, prefill: Served, decode: Served, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "http":
        monkeypatch.setattr("ingot.runtime.server.prefill_client.map_lease", lambda *_: None)
    asked = body(zlib.crc32(f"{by} {more}".encode()) % 10_000, **more)
    assert decode.runner.blocks.tokens_per_block == SIZE
    whole = (len(asked["prompt"]) - 1) // SIZE * SIZE
    before, computed, moved = fetched(decode), computed_tokens(decode), computed_tokens(prefill)
    expected, _ = answer(served, asked)
    found, cached = answer(decode, asked)
    assert found == expected
    assert cached == whole > 0
    assert fetched(decode) == before + 1
    assert computed_tokens(prefill) - moved == whole
    assert computed_tokens(decode) - computed < len(asked["prompt"])
    again, cached = answer(decode, asked)
    assert (again, cached) == (expected, whole)
    assert fetched(decode) == before + 1, "the blocks are there"


@pytest.mark.slow
def test_chats_streams_and_batches(prefill: Served, decode: Served, served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "the cat sat " * 20}], "max_tokens": 8, "temperature": 0}
    asked = body(21, temperature=0, stream=True)
    batch = {**body(22, temperature=0), "prompt": [prompt_of(100, 23), prompt_of(70, 24), prompt_of(100, 23)]}
    told = []
    before = fetched(decode)
    for each in (served, decode):
        with each.http() as http:
            stream = http.post(PATH, json=asked).text
            lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
            ids = [choice["token_ids"] for line in lines for choice in json.loads(line)["choices"]]
            tokens = list(itertools.chain.from_iterable(ids))
            said = http.post("/v1/chat/completions", json=chat).json()["choices"]
            told.append((tokens, said, http.post(PATH, json=batch).json()["choices"]))
    assert told[0] == told[1]
    assert fetched(decode) >= before + 4


def test_a_resumed_answer_is_fetched_too(prefill: Served, decode: Served, served: Served) -> None:
    asked = body(31, **SEEDED, max_tokens=60)
    expected, _ = answer(served, asked)
    tokens = expected[0]["token_ids"]
    (rest,), _ = answer(decode, {**asked, "resume_token_ids": tokens[:40]})
    assert rest["token_ids"] == tokens[40:]


def test_salts_keep_blocks_apart(prefill: Served, decode: Served) -> None:
    asked = body(41, temperature=0, max_tokens=1)
    before, computed = fetched(decode), computed_tokens(prefill)
    for salt in ("one", "two", "one"):
        answer(decode, {**asked, "cache_salt": salt})
    assert fetched(decode) == before + 2
    assert computed_tokens(prefill) - computed == 2 * (149 // SIZE * SIZE)


def test_prompts_whose_rows_are_wanted_are_computed_here(decode: Served, served: Served) -> None:
    asked = body(51, temperature=0, prompt_logprobs=1)
    before = fetched(decode)
    assert answer(decode, asked)[0] == answer(served, asked)[0]
    assert fetched(decode) == before


def test_short_prompts_are_computed_here(engine: Path, prefill: Served) -> None:
    with serving_engine(engine, decoding(prefill.url, prefill_min_tokens=100)) as own:
        answer(own, body(52, 60))
        assert fetched(own, "short or cached") == 1


def test_a_prefill_server_answers_prefill_alone(prefill: Served, decode: Served) -> None:
    with prefill.http() as http:
        for path in (PATH, "/v1/chat/completions", "/v1/messages", "/v1/responses"):
            found = http.post(path, json={})
            assert found.status_code == 400
            assert "--role prefill" in found.json()["error"]["message"]
        assert http.get("/health").status_code == 200
        assert {"/kv/prefill", "/kv/leases/{lease_id}"} <= set(http.get("/openapi.json").json()["paths"])
    with decode.http() as http:
        assert http.post("/kv/prefill", json={}).status_code == 404


@pytest.mark.slow
def test_leases_are_fetched_released_and_expire(engine: Path, prefill: Served) -> None:
    with prefill.http() as http:
        offer = offer_of(prefill, http).json()
        lease = f"/kv/leases/{offer['lease']}"
        data = http.get(lease)
        assert (data.status_code, len(data.content), offer["blocks"]) == (200, offer["bytes"], 64 // SIZE)
        assert http.get(lease).content == data.content
        assert http.delete(lease).json() == {"released": True}
        gone = http.get(lease)
        assert (gone.status_code, "expired or was released" in gone.text) == (404, True)
        other = http.get("/kv/leases/0123456789abcdef-1")
        assert (other.status_code, "started again" in other.text) == (404, True)
    with serving_engine(engine, dataclasses.replace(PREFILL, lease_timeout=0.2)) as own, own.http() as http:
        offer = offer_of(own, http).json()
        assert os.path.exists(offer["path"])
        assert eventually(lambda: not own.service.leases.nbytes, 10)
        assert http.get(f"/kv/leases/{offer['lease']}").status_code == 404
        assert not os.path.exists(offer["path"])


@pytest.mark.slow
def test_what_the_prefill_server_refuses(engine: Path, prefill: Served) -> None:
    with prefill.http() as http:
        wrong = offer_of(prefill, http, engine="0" * 64)
        assert (wrong.status_code, "different engines" in wrong.text) == (409, True)
        odd = offer_of(prefill, http, token_ids=prompt_of(63))
        assert (odd.status_code, f"whole blocks of {SIZE}" in odd.text) == (400, True)
        assert offer_of(prefill, http, token_ids=[1 << 30] * SIZE).status_code == 400
    with serving_engine(engine, dataclasses.replace(PREFILL, lease_memory=100)) as own, own.http() as http:
        full = offer_of(own, http)
        assert (full.status_code, "--lease_memory" in full.text) == (503, True)
        assert eventually(own.is_empty, 10)


@pytest.mark.slow
def test_the_command(engine: Path, served: Served) -> None:
    """Both servers as users start them; then the first one is killed."""
    with ServeProcess(engine, ("--role", "prefill")) as first:
        options = ("--role", "decode", "--prefill_url", first.url, "--prefill_min_tokens", 1)
        with ServeProcess(engine, options) as second:
            asked = body(95, temperature=0)
            found = httpx.post(f"{second.url}{PATH}", json=asked, timeout=60).json()
            assert found["choices"] == answer(served, asked)[0]
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 149 // SIZE * SIZE
            metrics = httpx.get(f"{second.url}/metrics").text
            assert 'ingot_prompts_fetched_total{outcome="fetched"} 1.0' in metrics
            first.process.kill()
            first.wait()
            asked = body(96, **SEEDED)
            found = httpx.post(f"{second.url}{PATH}", json=asked, timeout=60).json()
            assert found["choices"] == answer(served, asked)[0]
            metrics = httpx.get(f"{second.url}/metrics").text
            assert 'ingot_prompts_fetched_total{outcome="computed here"} 1.0' in metrics
