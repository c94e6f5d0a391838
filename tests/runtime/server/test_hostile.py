"""Forms of answers that cost as much as they can, beside others' requests: these go on as if nothing were."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from ingot.runtime.guided.grammar_tokenizer import GrammarTokenizer
from ingot.runtime.guided.library import Library
from ingot.runtime.guided.matcher import GrammarCache
from tests.runtime.hostile import FORMS
from tests.runtime.server.served import Served, eventually

pytest.importorskip("llguidance", reason="needs llguidance")

FREE: dict[str, Any] = {"prompt": "Once", "max_tokens": 60, "temperature": 0.8, "seed": 4, "ignore_eos": True}
SLOW = {"wide", "many choices", "many objects", "products of choices", "refused at the end", "long text", "deeper"}


def ask(served: Served, **fields: Any) -> httpx.Response:
    with served.http() as http:
        body = json.dumps({"prompt": "Say", "max_tokens": 12, "seed": 1, **fields})  # escapes what is no UTF-8
        return http.post("/v1/completions", content=body)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.slow
def test_grammars_that_compile_for_long_hold_up_no_other_request(
    served: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ask(served, **FREE).json()["choices"]
    gate, begun, compile_ = threading.Event(), threading.Semaphore(0), GrammarCache._compile

    def slow(cache: GrammarCache, kind: str, text: str) -> Any:
        begun.release()
        assert gate.wait(60)
        return compile_(cache, kind, text)

    monkeypatch.setattr(GrammarCache, "_compile", slow)
    try:
        guided = [pool.submit(ask, served, guided_regex=f"a{n}") for n in range(6)]
        assert begun.acquire(timeout=20)
        with served.http() as http:
            assert ask(served, **FREE).json()["choices"] == alone
            assert http.post("/tokenize", json={"prompt": "a"}).is_success
            assert http.get("/health/ready").status_code == 200
        assert not any(each.done() for each in guided)
    finally:
        gate.set()
    assert [each.result().json()["choices"][0]["text"] for each in guided] == [f"a{n}" for n in range(6)]


@pytest.mark.slow
def test_hostile_forms_beside_a_stream(
    served: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is answered or refused in words. What costs most, compiling and the first mask, is on no thread of ours that
    others wait for, and texts of any length are cut into tokens by the piece."""
    alone = ask(served, **FREE).json()["choices"]
    threads, sizes, call, encode = set[str](), [0], Library.call, GrammarTokenizer._encode

    def watched(library: Library, name: str, *arguments: Any) -> Any:
        if name in ("llg_new_matcher", "llg_matcher_compute_mask_into"):
            threads.add(threading.current_thread().name)
        return call(library, name, *arguments)

    def measured(tokenizer: GrammarTokenizer, data: bytes) -> tuple[int, ...]:
        sizes.append(len(data))
        return encode(tokenizer, data)

    monkeypatch.setattr(Library, "call", watched)
    monkeypatch.setattr(GrammarTokenizer, "_encode", measured)
    forms = [{"regex": "x{50000}"}, *(form for name, form in FORMS.items() if name not in SLOW)]
    free = [pool.submit(ask, served, **FREE) for _ in range(2)]
    for answer in pool.map(lambda form: ask(served, structured_outputs=form), forms):
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or len(answer.json()["error"]["message"]) < 3000
    assert [each.result().json()["choices"] for each in free] == [alone, alone]
    assert threads == {"ingot grammar"}
    assert max(sizes) <= 1024
    assert eventually(served.is_empty)
