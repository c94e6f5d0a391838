"""Prefill apart from decode where the servers divide the model among ranks, each in its own way: answers have the bits
of one server, also when a rank is lost."""

import contextlib
import functools
import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import open_engine
from ingot.quickstart import SHIPPED
from ingot.runtime.distributed import find_mpirun
from ingot.runtime.server.prefill_client import engine_digest
from tests.e2e.test_serve_ranks import ranks_of
from tests.runtime.server.apart import PATH, SEEDED, SIZE, answer, body
from tests.runtime.server.served import Served, ServeProcess, eventually, serving_engine
from tests.runtime.server.test_nixl_blocks import needs_nixl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mpi4py") is None or find_mpirun() is None, reason="needs mpi4py and mpirun"
    ),
]
LAYOUTS = {"whole": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "2x2": (2, 2), "tp4": (4, 1)}
PAIRS = [
    ("whole", "tp2", "auto"),
    ("tp2", "whole", "auto"),
    ("tp2", "pp2", "mpi"),
    ("pp2", "tp2", "auto"),
    ("2x2", "2x2", "auto"),
    ("tp4", "whole", "mpi"),  # of 2 key heads, which 2 ranks each have
    ("whole", "tp4", "mpi"),
]
BY_NIXL = ("--kv_transport", "nixl", "--lease_memory", "64MiB")
WHOLE = 149 // SIZE * SIZE  # tokens of whole blocks of a prompt


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("apart")
    convert(ConvertOptions(model_dir=SHIPPED, output_dir=work / "c"))
    for name, (tp, pp) in LAYOUTS.items():
        config = BuildConfig(target="cpu", tp_size=tp, pp_size=pp, sum_parts=4, autotune=False)
        build(config, work / "c", work / name)
    return work


@pytest.fixture(scope="module")
def served(engines: Path) -> Iterator[Served]:
    """One server, which computes everything."""
    with serving_engine(engines / "whole", threads=1) as found:
        yield found


@contextlib.contextmanager
def apart(engines: Path, prefill: str, decode: str, *options: object) -> Iterator[tuple[ServeProcess, ServeProcess]]:
    """Both servers as users start them. options: of both, beside the role's."""
    both = ("--threads", 1, "--rank_timeout", 5, "--debug_hooks", *options)
    with ServeProcess(engines / prefill, (*both, "--role", "prefill")) as first:
        own = ("--role", "decode", "--prefill_url", first.url, "--prefill_min_tokens", 1)
        with ServeProcess(engines / decode, (*both, *own)) as second:
            yield first, second


def ask(server: ServeProcess, asked: dict[str, Any]) -> tuple[Any, int]:
    """The choices, and how many tokens of the prompt came from the cache."""
    found = httpx.post(f"{server.url}{PATH}", json=asked, timeout=60)
    assert found.status_code == 200, found.text
    told = found.json()
    return told["choices"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def metric(server: ServeProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=20).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def fetched(server: ServeProcess, outcome: str = "fetched") -> float:
    return metric(server, f'ingot_prompts_fetched_total{{outcome="{outcome}"}}')


def is_empty(server: ServeProcess) -> bool:
    return not sum(metric(server, f"ingot_{name}") for name in ("blocks_used", "requests_running", "requests_waiting"))


def has_gone(path: Path) -> bool:
    return not path.exists()


@pytest.mark.parametrize(
    ("prefill", "decode", "collectives", "more"),
    [*((*pair, ()) for pair in PAIRS), pytest.param("tp2", "pp2", "auto", BY_NIXL, marks=needs_nixl, id="nixl")],
)
def test_the_answers_of_one_server(
    prefill: str, decode: str, collectives: str, more: tuple[str, ...], engines: Path, served: Served
) -> None:
    """One by one, a stream, then several at once."""
    asked = [body(301, temperature=0, logprobs=3), body(302, **SEEDED, logprobs=2), body(303, **SEEDED, n=3)]
    at_once = [body(number, 40 + 9 * number % 150, **SEEDED, max_tokens=30) for number in range(311, 317)]
    expected = [answer(served, each)[0] for each in (*asked, *at_once)]
    stream = body(304, temperature=0, stream=True, max_tokens=30)
    with served.http() as http:
        streamed = tokens(http.post(PATH, json=stream).text)
    with apart(engines, prefill, decode, "--collectives", collectives, *more) as (first, second):
        for each, wanted in zip(asked, expected, strict=False):
            assert ask(second, each) == (wanted, WHOLE)
        assert fetched(second) == len(asked)
        assert tokens(httpx.post(f"{second.url}{PATH}", json=stream, timeout=60).text) == streamed
        assert len(streamed) == 30
        found: list[Any] = [None] * len(at_once)

        def work(place: int) -> None:
            found[place] = ask(second, at_once[place])[0]

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(at_once))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected[len(asked) :]
        assert fetched(second) == len(asked) + 1 + len(at_once)
        assert fetched(second, "computed here") == 0
        assert ask(second, asked[0]) == (expected[0], WHOLE)
        assert fetched(second) == len(asked) + 1 + len(at_once), "the blocks are there"
        assert eventually(lambda: is_empty(first) and is_empty(second), 20)


def test_a_lease_is_one_layout_and_is_given_back(engines: Path) -> None:
    """Servers of different layouts lease the same bytes."""
    with open_engine(engines / "whole") as opened:
        asked = {"engine": engine_digest(opened), "token_ids": body(321, 64)["prompt"]}
    leased = []
    for name in ("whole", "2x2"):
        with ServeProcess(engines / name, ("--threads", 1, "--role", "prefill", "--lease_timeout", 1)) as server:
            offer = httpx.post(f"{server.url}/kv/prefill", json=asked, timeout=60).json()
            lease = f"{server.url}/kv/leases/{offer['lease']}"
            leased.append((httpx.get(lease).content, offer["crc32"], offer["blocks"], offer["last_key"]))
            assert httpx.delete(lease).json() == {"released": True}
            assert "expired or was released" in httpx.get(lease).text
            other = httpx.post(f"{server.url}/kv/prefill", json=asked, timeout=60).json()
            assert other["lease"].partition("-")[0] == offer["lease"].partition("-")[0], "the generation of the server"
            assert Path(other["path"]).exists()
            assert eventually(functools.partial(has_gone, Path(other["path"])), 20), "it expires"
            assert is_empty(server)
    assert leased[0] == leased[1]
    assert leased[0][2] == 64 // SIZE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_rank_that_is_lost(number: signal.Signals, engines: Path, served: Served) -> None:
    with apart(engines, "2x2", "tp2") as (first, second):
        assert ask(second, body(331, **SEEDED)) == (answer(served, body(331, **SEEDED))[0], WHOLE)
        ranks = ranks_of(first.process)
        assert sorted(ranks) == [0, 1, 2, 3]
        os.kill(ranks[3], number)
        for seed in (332, 333):
            asked = body(seed, **SEEDED)
            assert ask(second, asked) == (answer(served, asked)[0], 0)
        assert fetched(second, "computed here") == 2
        assert first.wait(30) != 0
        assert "rank 3" in first.err
        assert eventually(lambda: is_empty(second), 20)
        assert "computes a prompt itself" in second.err


def test_a_client_that_leaves_frees_both_sides(engines: Path) -> None:
    with apart(engines, "tp2", "pp2") as (first, second):
        assert httpx.post(f"{first.url}/debug/stall", json={"seconds": 2}).status_code == 202
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{second.url}{PATH}", json=body(341), timeout=0.5)
        assert eventually(lambda: fetched(second, "aborted") == 1, 20)
        assert eventually(lambda: is_empty(first) and is_empty(second), 20)
        assert ask(second, body(342, temperature=0))[1] == WHOLE


def test_sums_that_are_cut_otherwise_are_refused(engines: Path, tmp_path: Path, served: Served) -> None:
    """An engine of one rank with its own order of sums computes other bits: its blocks are not taken."""
    build(BuildConfig(target="cpu", autotune=False), engines / "c", tmp_path / "alone")
    with ServeProcess(tmp_path / "alone", ("--threads", 1, "--role", "prefill")) as first:
        own = ("--threads", 1, "--role", "decode", "--prefill_url", first.url, "--prefill_min_tokens", 1)
        with ServeProcess(engines / "tp2", own) as second:
            asked = body(351, **SEEDED)
            assert ask(second, asked) == (answer(served, asked)[0], 0)
            assert fetched(second, "computed here") == 1
        assert "different engines" in second.err
        assert "--sum_parts must not" in second.err


def tokens(text: str) -> list[int]:
    lines = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [token for line in lines for choice in line["choices"] for token in choice["token_ids"]]
