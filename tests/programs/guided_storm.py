"""Random regexes and schemas, half of them given up on the way, beside free requests; then what is left behind.

python -m tests.programs.guided_storm ENGINE [--requests 10000] [--seed 0]

ENGINE has a tokenizer. Every grammar is a new one, one request in twenty has one that cannot be enforced. Ends with an
error if a free request differs from the same one alone, an answer breaks its grammar, or anything is left: handles of
the library, blocks, requests.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.generate_text import stream_text
from ingot.runtime.guided.library import Library
from ingot.runtime.guided.matcher import GrammarCache
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.outlet import Outlet
from ingot.runtime.request import FinishReason, Request
from ingot.runtime.text_stream import TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer

AT_ONCE, FREE, MAX_TOKENS = 24, 8, 24
WRONG: tuple[dict[str, Any], ...] = ({"regex": "(a"}, {"regex": "(?=a)b"}, {"json": {"type": "nothing"}})


def random_regex(draw: random.Random, deep: int = 3) -> str:
    """One that Python reads alike."""
    kind = draw.randrange(5) if deep else 0
    if kind == 0:
        first, last = sorted(draw.sample("abcdefghijklm", 2))
        return f"[{first}-{last}]{{{draw.randrange(1, 4)},{draw.randrange(4, 9)}}}"
    if kind == 1:
        return f"({random_regex(draw, deep - 1)}|{random_regex(draw, deep - 1)})"
    if kind == 2:
        return f"({random_regex(draw, deep - 1)})?x{draw.randrange(10**6)}"
    return random_regex(draw, deep - 1) + random_regex(draw, deep - 1)


def random_schema(draw: random.Random, deep: int = 3) -> dict[str, Any]:
    """With a title that no other has."""
    title = str(draw.random())
    kinds = ("string", "integer", "number", "boolean", "null", "enum", "object", "array", "anyOf")
    kind = draw.choice(kinds if deep else kinds[:6])
    if kind == "enum":
        return {"title": title, "enum": draw.sample(["a", 1, None, "b c", 2.5, True], 3)}
    if kind == "anyOf":
        return {"title": title, "anyOf": [random_schema(draw, deep - 1) for _ in range(2)]}
    if kind == "array":
        return {"title": title, "type": kind, "items": random_schema(draw, deep - 1), "maxItems": draw.randrange(4)}
    if kind == "object":
        named = {name: random_schema(draw, deep - 1) for name in draw.sample("abcdef", draw.randrange(4))}
        return {
            "title": title,
            "type": kind,
            "properties": named,
            "required": list(named)[:2],
            "additionalProperties": False,
        }
    return {"title": title, "type": kind, **({"maxLength": draw.randrange(8)} if kind == "string" else {})}


def random_form(draw: random.Random) -> dict[str, Any]:
    """A StructuredOutputs as a request has it."""
    if draw.random() < 0.05:
        return draw.choice(WRONG)
    return {"regex": random_regex(draw)} if draw.random() < 0.5 else {"json": random_schema(draw)}


def free_request(place: int) -> TextRequest:
    """The same one whenever it is asked for."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=place)
    return TextRequest(prompt=f"Once upon a time {place}", params=params)


@dataclasses.dataclass(kw_only=True)
class Running:
    """form: None of a free request, which should say `alone`. gives_up: with this many tokens."""

    stream: TextStream
    form: dict[str, Any] | None
    alone: str
    gives_up: int
    text: str = ""
    tokens: int = 0


class Storm:
    """counts: of requests, by what became of them."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, seed: int) -> None:
        self._runner, self._tokenizer, self._draw = runner, tokenizer, random.Random(seed)
        self._outlet, self._running, self.counts = Outlet(), dict[Request, Running](), Counter[str]()
        self._alone = [self._complete(free_request(place)) for place in range(FREE)]

    def run(self, count: int) -> None:
        """That many requests, AT_ONCE at a time. Raises AssertionError for a wrong answer."""
        for _ in range(count):
            self._begin()
            while len(self._running) >= AT_ONCE:
                self._read()
        while self._running:
            self._read()

    def _complete(self, asked: TextRequest) -> str:
        return "".join(event.text for event in stream_text(self._runner, self._tokenizer, [asked]))

    def _begin(self) -> None:
        draw = self._draw
        place, form = draw.randrange(FREE), random_form(draw) if draw.random() < 0.75 else None
        asked = free_request(place)
        if form is not None:
            asked = dataclasses.replace(asked, params=dataclasses.replace(asked.params, structured_outputs=form))
        try:
            (stream,) = make_streams(self._runner, self._tokenizer, 0, asked)
        except RequestError:
            self.counts["refused"] += 1
            assert form is not None, "a free request is fine"
            return
        assert form not in WRONG, "what cannot be enforced is refused"
        self._runner.executor.add([stream.request], self._outlet)
        gives_up = draw.randrange(8) if form is not None and draw.random() < 0.5 else MAX_TOKENS + 1
        self._running[stream.request] = Running(stream=stream, form=form, alone=self._alone[place], gives_up=gives_up)
        if gives_up == 0:
            self._give_up(stream.request)

    def _give_up(self, request: Request) -> None:
        self._runner.executor.abort([request])
        del self._running[request]
        self.counts["given up"] += 1

    def _read(self) -> None:
        for progress in self._outlet.get_all():
            if (found := self._running.get(progress.request)) is None:
                continue  # given up
            event = found.stream.next_event(progress)
            found.text, found.tokens = found.text + event.text, found.tokens + len(event.token_ids)
            assert event.error is None, event.error
            if event.finish_reason is not None:
                del self._running[progress.request]
                self._check(found, event.finish_reason)
            elif found.tokens >= found.gives_up:
                self._give_up(progress.request)

    def _check(self, found: Running, reason: FinishReason) -> None:
        if found.form is None:
            assert found.text == found.alone, "guided neighbours change no bits"
            self.counts["free"] += 1
        elif reason is FinishReason.LENGTH:
            self.counts["guided, cut at max_tokens"] += 1
        else:
            self.counts["guided, whole"] += 1
            regex = found.form.get("regex")
            assert regex is None or re.fullmatch(regex, found.text), (regex, found.text)
            assert regex is not None or fits(json.loads(found.text), found.form["json"]), (found.form, found.text)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether an instance is one of a `random_schema`."""
    if "enum" in schema:
        return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "object": dict,
        "array": list,
        "boolean": bool,
    }
    if schema["type"] == "null" or not isinstance(value, kinds[schema["type"]]):
        return value is None and schema["type"] == "null"
    if schema["type"] == "object":
        named = schema["properties"]
        known = set(schema["required"]) <= value.keys() <= named.keys()
        return known and all(fits(value[name], named[name]) for name in value)
    if schema["type"] == "array":
        return len(value) <= schema["maxItems"] and all(fits(each, schema["items"]) for each in value)
    return bool(schema["type"] != "string" or len(value) <= schema["maxLength"])


@contextlib.contextmanager
def counted_handles() -> Iterator[Callable[[], int]]:
    """How many matchers the library holds for us, of those made meanwhile."""
    made, call = Counter[str](), Library.call

    def counting(self: Library, name: str, *arguments: Any) -> Any:
        made[name] += 1
        return call(self, name, *arguments)

    with patch.object(Library, "call", counting):
        yield lambda: made["llg_new_matcher"] + made["llg_clone_matcher"] - made["llg_free_matcher"]


def resident_mb() -> float:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def storm(engine: Path, count: int, seed: int) -> tuple[Counter[str], list[float], dict[str, int], GrammarCache]:
    """What became of requests; resident MB after a quarter of them, and at the end; what is left; the kept grammars."""
    resident = []
    with ModelRunner.from_dir(engine) as runner:
        requests = Storm(runner, Tokenizer.from_dir(engine), seed)
        for part in (count // 4, count - count // 4):
            requests.run(part)
            resident.append(resident_mb())
        stats = runner.stats()
        left = {"blocks": stats["blocks_used"], "running": stats["requests_running"]}
        left["waiting"] = stats["requests_waiting"]
        return requests.counts, resident, left, runner.guides.cache


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    with counted_handles() as handles:
        counts, resident, left, cached = storm(options.engine, options.requests, options.seed)
        gc.collect()
        left["handles beside the kept grammars"] = handles() - len(cached)
    left["requests"] = sum(type(each) is Request for each in gc.get_objects())
    seconds = time.perf_counter() - begin
    print(f"{counts.total()} requests in {seconds:.0f} s: {dict(sorted(counts.items()))}")
    print(f"resident: {resident[0]:.0f} MB after a quarter, {resident[1]:.0f} MB at the end")
    print(f"left: {left}")
    assert not any(left.values()), left


if __name__ == "__main__":
    main()
