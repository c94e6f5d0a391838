"""Clients that misbehave at random, under load: no block is lost, nothing answers 5xx, the patient get their text."""

import asyncio
import json
import random
import time
from typing import Any

import pytest

from tests.runtime.server.served import Served, eventually

pytestmark = pytest.mark.native
PATIENT = {"model": "tiny", "prompt": "The prince looked at", "max_tokens": 24, "temperature": 0}
AT_ONCE = 40

BROKEN = (
    b"{",
    b"",
    b"[]",
    b'"x"',
    b"null",
    b"\xff\xfe",
    b'{"prompt": NaN}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": []}',
    b'{"prompt": [[]]}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": 1e30}',
    b'{"prompt": "a", "top_p": 0}',
    b'{"prompt": "a", "logit_bias": {"999999999": 1}}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "x": 1}',
    b'{"prompt": "a", "stop_token_ids": [4294967296], "min_tokens": 3}',
    b'{"prompt": "a", "n": 100000}',
    b'{"prompt": "a", "logit_bias": {"5": 1e308}}',
    b'{"prompt": "a", "temperature": 1e-300}',
    b'{"prompt": "a", "stream_options": {}}',
    b"[" * 5000,
    b'{"prompt": "' + b"a" * 20_000 + b'"}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user"}], "top_logprobs": 3}',
)


class Chaos:
    """Many connections at once, each with one request and one way to behave."""

    def __init__(self, served: Served, seed: int) -> None:
        self._port = int(served.url.rsplit(":", 1)[1])
        self._random = random.Random(seed)
        self.statuses: dict[int, int] = {}
        self.texts: set[str] = set()

    async def run(self, count: int) -> None:
        """`count` requests, AT_ONCE at a time."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(place: int) -> None:
            async with gate:
                await self._one(place)

        await asyncio.gather(*map(one, range(count)))

    async def _one(self, place: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            if place % 20 == 0:
                await self._wait_for_text(reader, writer)
            else:
                await self._misbehave(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _wait_for_text(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = _request("/v1/completions", json.dumps(PATIENT).encode())
        writer.write(head + body)
        status, answer = await self._read(reader)
        assert status == 200, answer
        self.texts.add(json.loads(answer)["choices"][0]["text"])

    async def _misbehave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        way, chance = self._random.randrange(6), self._random.random()
        path, body = self._body()
        head, data = _request(path, self._random.choice(BROKEN) if way == 0 else body)
        if way == 1:  # leaves in the middle of the request
            writer.write((head + data)[: int(chance * len(head + data))])
            await asyncio.sleep(chance / 50)
        elif way == 2:  # leaves at some moment of the answer, with a reset
            writer.write(head + data)
            await asyncio.sleep(chance / 10)
            writer.transport.abort()
        elif way == 3:  # reads a little, then leaves
            writer.write(head + data)
            await asyncio.wait_for(reader.read(int(chance * 2000) + 1), 60)
        elif way == 4:  # noise
            writer.write(self._random.randbytes(int(chance * 300)) + b"\r\n\r\n")
            await asyncio.sleep(chance / 50)
        else:
            writer.write(head + data)
            await self._read(reader)

    def _body(self) -> tuple[str, bytes]:
        rng = self._random
        body: dict[str, Any] = {
            "max_tokens": rng.randint(1, 200),
            "stream": rng.random() < 0.5,
            "n": rng.randint(1, 3),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "ignore_eos": rng.random() < 0.5,
            "min_p": rng.random(),
            "frequency_penalty": rng.choice([0, 0.5]),
            "priority": rng.randint(-2, 2),
            "timeout": rng.choice([0.02, 5]),
        }
        if rng.random() < 0.5:
            words = ["the", "prince", "count", "looked", "said", "and", "of", "war", "peace"]
            body |= {"prompt": " ".join(rng.choices(words, k=rng.randint(1, 60))), "echo": rng.random() < 0.2}
            body |= {"logprobs": 3, "n": 1} if rng.random() < 0.3 else {}
            return "/v1/completions", json.dumps(body).encode()
        body["messages"] = [{"role": "user", "content": "what now? " * rng.randint(1, 8)}]
        return "/v1/chat/completions", json.dumps(body).encode()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """One whole answer."""
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        status = int(head.split()[1])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        if length:
            return status, await reader.readexactly(length)
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            piece = await asyncio.wait_for(reader.read(65536), 60)
            if not piece:
                break
            body += piece
        return status, body


def _request(path: str, body: bytes) -> tuple[bytes, bytes]:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode(), body


def survives(served: Served, count: int, seed: int) -> None:
    """The claims of this file."""
    with served.http() as http:
        expected = http.post("/v1/completions", json=PATIENT).json()["choices"][0]["text"]
        chaos = Chaos(served, seed)
        asyncio.run(chaos.run(count))
        assert eventually(served.is_empty, 20), served.runner.stats()
        assert eventually(lambda: not served.service.active and not served.service.sequences)
        assert chaos.texts == {expected}
        assert chaos.statuses.keys() <= {200, 400, 408, 413, 429}, chaos.statuses
        assert chaos.statuses[200] > count // 20
        assert chaos.statuses[400] > count // 20
        assert http.get("/health/ready").status_code == 200
        assert http.post("/v1/completions", json=PATIENT).json()["choices"][0]["text"] == expected


@pytest.mark.slow
def test_a_few_hundred(served: Served) -> None:
    survives(served, 240, seed=1)


@pytest.mark.slow
@pytest.mark.long
def test_ten_thousand(served: Served) -> None:
    begin = time.monotonic()
    survives(served, 10_000, seed=2)
    print(f"{time.monotonic() - begin:.0f} s")
