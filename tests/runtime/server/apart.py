"""A prefill server and a decode server, as tests want them; whatever they are asked, neither keeps anything."""

import dataclasses
import functools
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.configs.serve import ServeConfig
from ingot.runtime.server.prefill_client import engine_digest
from tests.runtime.server.served import CONFIG, Served, eventually, serving_engine

PATH = "/v1/completions"
SIZE = 32  # tokens of a block
PREFILL = dataclasses.replace(CONFIG, role="prefill", lease_timeout=20.0)
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1}


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
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blocks and leases of both sides, and their files."""
    sides = [request.getfixturevalue(name) for name in ("prefill", "decode") if name in request.fixturenames]
    yield
    for side in sides:
        assert eventually(side.is_empty, 20)
        assert eventually(functools.partial(has_no_lease, side), 20)
    gc.collect()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    assert not [link for link in links if os.path.islink(link) and "ingot kv" in os.readlink(link)]


def has_no_lease(side: Served) -> bool:
    return not side.service.leases.nbytes


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


def check_fallback(own: Served, served: Served, seed: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """An answer with equal bits, that this server computed itself; and why."""
    asked = body(seed, **SEEDED)
    before = fetched(own, "computed here")
    expected = answer(served, asked)[0]
    found, cached = answer(own, asked)
    assert (found, cached) == (expected, 0)
    assert fetched(own, "computed here") == before + 1
    assert words in caplog.text


def offer_of(prefill: Served, http: httpx.Client, **more: Any) -> httpx.Response:
    asked = {"engine": engine_digest(prefill.runner.engine), "token_ids": prompt_of(64, 61), **more}
    return http.post("/kv/prefill", json=asked)
