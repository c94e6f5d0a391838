"""Guided and free requests at once, many of them given up half-way: bits stay, and nothing is left behind."""

import asyncio
import gc
import random
from typing import Any

import httpx
import pytest

from ingot.runtime.guided.matcher import Matcher
from tests.runtime.server.served import Served, eventually

pytest.importorskip("llguidance", reason="needs llguidance")

FREE, GUIDED = 6, 18
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def _form(draw: random.Random, place: int) -> dict[str, Any]:
    """A form of its own for every request, so that none is found compiled."""
    kind = draw.randrange(3)
    if kind == 0:
        return {"guided_regex": f"[a-{draw.choice('fgh')}]{{{place + 3}}}"}
    if kind == 1:
        return {"guided_json": {**SCHEMA, "title": str(place)}}
    return {"guided_choice": [f"the {place}", f"one {place}"]}


async def _ask(http: httpx.AsyncClient, body: dict[str, Any], give_up: bool) -> str | None:
    """The text; None where the client has left after the first piece."""
    if not give_up:
        answer = await http.post("/v1/completions", json=body)
        assert answer.is_success, answer.text
        return str(answer.json()["choices"][0]["text"])
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        async for _ in stream.aiter_bytes():
            break
    return None


@pytest.mark.slow
def test_storm(served: Served) -> None:
    draw = random.Random(5)
    free = [{"prompt": f"Once {place}", "max_tokens": 24, "temperature": 0.8, "seed": place} for place in range(FREE)]

    async def all_at_once(bodies: list[tuple[dict[str, Any], bool]]) -> list[str | None]:
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            return await asyncio.gather(*(_ask(http, body, give_up) for body, give_up in bodies))

    alone = asyncio.run(all_at_once([(body, False) for body in free[:1]]))
    alone += asyncio.run(all_at_once([(body, False) for body in free[1:]]))
    guided = [{"prompt": "Say", "max_tokens": 24, "seed": place, **_form(draw, place)} for place in range(GUIDED)]
    mixed = [(body, draw.random() < 0.5) for body in guided] + [(body, False) for body in free]
    order = draw.sample(range(len(mixed)), len(mixed))
    found = asyncio.run(all_at_once([mixed[place] for place in order]))
    texts = dict(zip(order, found, strict=True))
    assert [texts[GUIDED + place] for place in range(FREE)] == alone, "guided neighbours change no bits"
    assert eventually(served.is_empty)
    cached = len(served.runner.guides.cache)

    def live() -> int:
        gc.collect()
        return sum(type(each) is Matcher for each in gc.get_objects())

    assert eventually(lambda: live() <= cached + 2), "beside those that are kept: of the last requests at most"
