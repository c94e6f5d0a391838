"""A decode server has prompts computed by a prefill server. Whatever happens there, answers have the same bits."""

import dataclasses
import gc
import itertools
import json
import os
import random
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.serve import ServeConfig
from ingot.runtime.server.prefill_client import engine_digest
from tests.runtime.server.served import CONFIG, Served, ServeProcess, eventually, serving_engine

pytestmark = pytest.mark.native
PATH = "/v1/completions"
SIZE = 32  # tokens of a block
PREFILL = dataclasses.replace(CONFIG, role="prefill", lease_timeout=20.0)
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1}


def decoding(*urls: str, **more: Any) -> ServeConfig:
    changed = {"prefill_min_tokens": 1, "prefill_timeout": 20.0, **more}
    return dataclasses.replace(CONFIG, role="decode", prefill_urls=urls, **changed)


@pytest.fixture(scope="module")
def prefill(engine: Path) -> Iterator[Served]:
    with serving_engine(engine, PREFILL) as found:
        yield found


@pytest.fixture(scope="module")
def decode(engine: Path, prefill: Served) -> Iterator[Served]:
    with serving_engine(engine, decoding(prefill.url)) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blocks and leases of both sides, and their files."""
    sides = [request.getfixturevalue(name) for name in ("prefill", "decode") if name in request.fixturenames]
    yield
    for side in sides:
        assert eventually(side.is_empty, 20)
        assert eventually(lambda side=side: not side.service.leases.nbytes, 20)
    gc.collect()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.islink(link) and "ingot kv" in os.readlink(link)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(length)]


def body(number: int, length: int = 150, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt_of(length, number), "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **more}


def answer(served: Served, asked: dict[str, Any]) -> tuple[Any, int]:
    """What the model says, and how many tokens of the prompt were in the cache."""
    with served.http() as http:
        found = http.post(PATH, json=asked)
    assert found.status_code == 200, found.text
    told = found.json()
    return told["choices"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def fetched(served: Served, outcome: str = "fetched") -> float:
    found = served.service.metrics.registry.get_sample_value("ingot_prompts_fetched_total", {"outcome": outcome})
    return found or 0.0


def computed_tokens(served: Served) -> int:
    """Prompt tokens that its steps have computed."""
    return sum(prefill for prefill, _ in served.runner.executor.step_log())


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


def offer_of(prefill: Served, http: httpx.Client, **more: Any) -> httpx.Response:
    asked = {"engine": engine_digest(prefill.runner.engine), "token_ids": prompt_of(64, 61), **more}
    return http.post("/kv/prefill", json=asked)


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


def check_fallback(own: Served, served: Served, seed: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """An answer with equal bits, that this server computed itself; and why."""
    asked = body(seed, **SEEDED)
    before = fetched(own, "computed here")
    expected = answer(served, asked)[0]
    found, cached = answer(own, asked)
    assert (found, cached) == (expected, 0)
    assert fetched(own, "computed here") == before + 1
    assert words in caplog.text


def test_another_engine_is_refused_in_words(
    engine: Path, tmp_path: Path, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    build(BuildConfig(precision="w8", autotune=False), engine.parent / "checkpoint", tmp_path / "other")
    with serving_engine(tmp_path / "other", PREFILL) as other, serving_engine(engine, decoding(other.url)) as own:
        check_fallback(own, served, 71, "different engines", caplog)
        assert other.is_empty()


def test_a_server_without_memory_for_leases(engine: Path, served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving_engine(engine, dataclasses.replace(PREFILL, lease_memory=100)) as full,
        serving_engine(engine, decoding(full.url)) as own,
    ):
        check_fallback(own, served, 72, "no memory for the blocks", caplog)
        check_fallback(own, served, 73, "no memory for the blocks", caplog)


def test_a_lease_that_expires_before_it_is_fetched(
    engine: Path, prefill: Served, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(*_: object) -> None:
        for lease_id in tuple(prefill.service.leases._open):
            prefill.loop.call_soon_threadsafe(prefill.service.leases.release, lease_id)
        assert eventually(lambda: not prefill.service.leases.nbytes)

    monkeypatch.setattr("ingot.runtime.server.prefill_client.map_lease", late)
    with serving_engine(engine, decoding(prefill.url)) as own:
        check_fallback(own, served, 74, "expired or was released", caplog)


@pytest.mark.parametrize("what", ["bytes", "key"])
def test_damage_is_noticed(
    what: str,
    engine: Path,
    prefill: Served,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if what == "bytes":
        monkeypatch.setattr("ingot.runtime.server.prefill_api.checksum", lambda data: 1)
    else:
        monkeypatch.setattr("ingot.runtime.kv_transfer.BlockRange.last_key", "of others")
        monkeypatch.setattr("ingot.runtime.server.prefill_api.PrefillApi._offer", _other_offer)
    with serving_engine(engine, decoding(prefill.url)) as own:
        check_fallback(own, served, 75, "damaged" if what == "bytes" else "other blocks", caplog)


def _other_offer(api: Any, blocks: Any, lease: Any, crc: int) -> dict[str, Any]:
    return {"lease": lease.lease_id, "first_block": 0, "blocks": blocks.count, "bytes": lease.nbytes, "last_key": "x"}


def test_nobody_listens_and_another_server_does(
    engine: Path, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that does not answer is left alone; the next one in turn is asked."""
    with serving_engine(engine, decoding("http://127.0.0.1:9")) as own:
        check_fallback(own, served, 76, "127.0.0.1:9", caplog)
        check_fallback(own, served, 77, "no prefill server answers", caplog)
    with serving_engine(engine, decoding("http://127.0.0.1:9", prefill.url)) as own:
        check_fallback(own, served, 78, "127.0.0.1:9", caplog)
        for seed in (79, 80):
            assert answer(own, body(seed))[1] > 0
        assert fetched(own) == 2


def test_keys_are_sent(engine: Path, served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with serving_engine(engine, dataclasses.replace(PREFILL, api_keys=("k1", "k2"))) as locked:
        with serving_engine(engine, decoding(locked.url, api_keys=("k2",))) as own, own.http("k2") as http:
            assert http.post(PATH, json=body(81)).status_code == 200
            assert fetched(own) == 1
        with serving_engine(engine, decoding(locked.url)) as own:
            check_fallback(own, served, 82, "API key", caplog)


def test_a_client_that_leaves_frees_both_sides(engine: Path, prefill: Served) -> None:
    """The prefill server is busy with another request's step; it forgets the prompt before it has computed it."""
    with serving_engine(engine, decoding(prefill.url)) as own, prefill.http() as http:
        assert http.post("/debug/stall", json={"seconds": 2}).status_code == 202
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{own.url}{PATH}", json=body(91), timeout=0.5)
        assert eventually(lambda: not own.service.active, 10)
        assert fetched(own, "aborted") == 1
        assert eventually(lambda: not prefill.service.active, 10)
        assert eventually(prefill.is_empty, 10)
        assert own.is_empty()


def test_the_prefill_server_ends_a_prompt(
    engine: Path, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancelled there, as by an operator: the decode server computes it at once."""

    def cancel() -> None:
        assert eventually(lambda: any(each.startswith("kv-") for each in tuple(prefill.service.active)), 20)
        (found,) = [each for each in tuple(prefill.service.active) if each.startswith("kv-")]
        with prefill.http() as http:
            assert http.post(f"/v1/requests/{found}/cancel").status_code == 200

    with serving_engine(engine, decoding(prefill.url)) as own, prefill.http() as http:
        assert http.post("/debug/stall", json={"seconds": 2}).status_code == 202
        ending = threading.Thread(target=cancel)
        ending.start()
        begin = time.monotonic()
        check_fallback(own, served, 92, "cancelled", caplog)
        assert time.monotonic() - begin < 10
        ending.join()


def test_a_server_that_hangs_is_not_waited_for(
    engine: Path, prefill: Served, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_engine(engine, decoding(prefill.url, prefill_timeout=0.3)) as own, prefill.http() as http:
        assert http.post("/debug/stall", json={"seconds": 2}).status_code == 202
        check_fallback(own, served, 93, "timed out", caplog)
        assert eventually(lambda: not prefill.service.active, 10), "the prefill server hears of it"


def kill_rounds(engine: Path, served: Served, rounds: int, seed: int) -> list[str]:
    """A prefill server is killed at random moments while four clients ask; what became of the prompts."""
    rng, outcomes = random.Random(seed), []
    for turn in range(rounds):
        with (
            ServeProcess(engine, ("--role", "prefill")) as killed,
            serving_engine(engine, decoding(killed.url, prefill_timeout=5.0)) as own,
        ):
            asked = [body(1000 * turn + place + seed, 400, **SEEDED, max_tokens=6) for place in range(4)]
            found: list[Any] = [None] * 4

            def ask(place: int, own: Served = own, asked: list[Any] = asked, found: list[Any] = found) -> None:
                found[place] = answer(own, asked[place])[0]

            threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(rng.uniform(0, 0.3))
            killed.process.kill()
            for thread in threads:
                thread.join(60)
            assert found == [answer(served, each)[0] for each in asked]
            assert eventually(own.is_empty, 10)
            for outcome in ("fetched", "computed here"):
                outcomes += [outcome] * int(fetched(own, outcome))
    return outcomes


@pytest.mark.slow
def test_a_prefill_server_is_killed_at_random_moments(engine: Path, served: Served) -> None:
    outcomes = kill_rounds(engine, served, 12, 8)
    assert len(outcomes) == 48
    assert set(outcomes) == {"fetched", "computed here"}, "some moments before the blocks came, some after"


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
