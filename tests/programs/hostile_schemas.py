"""What other clients notice of hostile schemas: the time between tokens of their streams, and the answer of /health.

python -m tests.programs.hostile_schemas ENGINE [--seconds 8] [--rounds 3] [--streams 4] [--hostile 4]

A server in a process of its own has `--streams` free streams all the time. In turns, it is let alone for `--seconds`,
and then asked as long by `--hostile` clients, one request after the other, for answers in the forms of
`tests/runtime/hostile.py`. Each is made anew, so that no grammar is found compiled.

Before that, random answers in each form: CPU time of the slowest of 300 steps, mask and consumed token.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided.guides import Guides
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.hostile import FORMS
from tests.runtime.server.served import ServeProcess

_PLACE = "hostile request number"
_PROBE = 0.01  # seconds between two looks at /health


def bodies(names: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """Requests for these forms, cut where their number goes."""
    found = []
    for form in map(FORMS.__getitem__, names):
        ((kind, value),) = form.items()
        if kind == "json":
            value = {**value, "title": _PLACE}
        elif kind == "choice":
            value = [*value, _PLACE]
        else:
            value = f"{value}|{_PLACE}" if kind == "regex" else f"{value}\n{'#' if '::=' in value else '//'} {_PLACE}"
        asked = {"prompt": "Say", "max_tokens": 40, "seed": 1, "structured_outputs": {kind: value}}
        try:
            head, tail = json.dumps(asked).encode().split(_PLACE.encode())
        except RecursionError:
            continue  # no client of ours can write it
        found.append((head, tail))
    return found


class Watch:
    """Seconds between tokens, and of answers of /health: while it is quiet, and while it is not."""

    def __init__(self, names: Sequence[str]) -> None:
        self._forms = bodies(names)
        self.hostile, self.over = False, False
        self.gaps: dict[bool, list[float]] = {False: [], True: []}
        self.looks: dict[bool, list[float]] = {False: [], True: []}
        self.answers = Counter[int | str]()
        self.slowest = 0.0

    async def stream(self, http: httpx.AsyncClient, seed: int) -> None:
        """A client that reads one answer after the other."""
        asked = {"prompt": "Once", "max_tokens": 400, "seed": seed, "ignore_eos": True, "stream": True}
        while not self.over:
            last = None
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.is_success
                async for _ in answer.aiter_bytes():
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps[self.hostile].append(now - last)
                    last = now
                    if self.over:
                        return

    async def look(self, http: httpx.AsyncClient) -> None:
        """A probe."""
        while not self.over:
            begin = time.perf_counter()
            answer = await http.get("/health")
            self.looks[self.hostile].append(time.perf_counter() - begin)
            assert answer.is_success, answer.text
            await asyncio.sleep(_PROBE)

    async def attack(self, http: httpx.AsyncClient, first: int, end: float) -> None:
        """A hostile client."""
        number = first
        while time.perf_counter() < end:
            number += 1
            head, tail = self._forms[number % len(self._forms)]
            begin = time.perf_counter()
            answer = await http.post(
                "/v1/completions",
                content=head + f"{number} {begin}".encode() + tail,
                headers={"content-type": "application/json"},
            )
            self.slowest = max(self.slowest, time.perf_counter() - begin)
            self.answers[answer.status_code] += 1


def slowest_step(guides: Guides, name: str, steps: int = 300) -> tuple[float, str, int] | None:
    """(milliseconds of CPU, the form, which step); None: the form is refused."""
    try:
        matcher = guides.matcher(StructuredOutputs(**FORMS[name]))
    except RequestError:
        return None
    draw, worst = random.Random(1), (0.0, name, 0)
    for step in range(steps):
        begin = time.thread_time()
        mask = matcher.allowed()
        masked = time.thread_time()
        tokens = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        if not tokens.size:
            break
        token, middle = int(draw.choice(tokens)), time.thread_time()
        ends = matcher.consume(token)
        worst = max(worst, ((masked - begin + time.thread_time() - middle) * 1e3, name, step))
        if ends:
            break
    return worst


async def measure(url: str, watch: Watch, seconds: float, rounds: int, streams: int, hostile: int) -> None:
    """All rounds."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        others = [asyncio.create_task(watch.stream(http, seed)) for seed in range(streams)]
        others.append(asyncio.create_task(watch.look(http)))
        await asyncio.sleep(1)
        for gaps in (*watch.gaps.values(), *watch.looks.values()):
            gaps.clear()
        for turn in range(rounds):
            watch.hostile = False
            await asyncio.sleep(seconds)
            watch.hostile = True
            end = time.perf_counter() + seconds
            await asyncio.gather(*(watch.attack(http, turn * 1000 + 7 * each, end) for each in range(hostile)))
        watch.over = True
        await asyncio.gather(*others)


def row(name: str, values: list[float]) -> str:
    """Milliseconds; dashes where nothing came in the time that was given."""
    if not values:
        return f"| {name} | 0 |" + " – |" * 5
    ordered = sorted(each * 1e3 for each in values)
    places = [ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.99, 0.999)]
    figures = [*places, ordered[-1], statistics.mean(ordered)]
    return f"| {name} | {len(ordered)} | " + " | ".join(f"{each:.2f}" for each in figures) + " |"


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--hostile", type=int, default=4)
    parser.add_argument("--form", action="append", choices=[*FORMS], help="only this one; may be repeated")
    options = parser.parse_args()
    names = options.form or [*FORMS]
    guides = Guides(options.engine, {max(Tokenizer.from_dir(options.engine).special_ids, default=0)})
    walked = sorted(filter(None, (slowest_step(guides, name) for name in names)), reverse=True)
    print(f"slowest steps, ms of CPU, of {len(walked)} forms that are not refused:")
    for milliseconds, name, step in walked[:5]:
        print(f"  {milliseconds:.2f} at step {step}: {name}")
    found = Watch(names)
    with ServeProcess(options.engine, ("--max_body_size", "4MiB")) as server:
        asyncio.run(measure(server.url, found, options.seconds, options.rounds, options.streams, options.hostile))
    print("| ms | n | p50 | p99 | p99.9 | worst | mean |\n|---|---|---|---|---|---|---|")
    for name, values in (("between tokens", found.gaps), ("/health", found.looks)):
        print(row(f"{name}, quiet", values[False]))
        print(row(f"{name}, hostile schemas", values[True]))
    print(f"hostile requests: {dict(found.answers)}, the slowest {found.slowest:.1f} s")


if __name__ == "__main__":
    main()
