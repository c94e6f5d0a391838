"""Random regexes and schemas, half of them given up on the way, beside free requests; then what is left behind.

python -m tests.programs.guided_storm ENGINE [--requests 10000] [--seed 0]

ENGINE has a tokenizer. Half of the grammars are new ones, half come again and again; one new one in twenty cannot be
enforced. The KV cache has less room than the requests want. Ends with an error if the bits of a free request differ
from those of the same one alone, an answer breaks its grammar, or anything is left: handles of the library, blocks,
requests.
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
from ingot.runtime.text_stream import TextEvent, TextRequest, TextStream, make_streams
from ingot.runtime.tokenizer import Tokenizer

AT_ONCE, FREE, MAX_TOKENS = 64, 8, 110
KV_CACHE_MEMORY = "1MiB"  # of the shipped model less than what so many sequences grow to: some are preempted
KNOWN = 12  # forms that come again and again, so that matchers serve one sequence after the other
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


def known_forms(draw: random.Random) -> list[dict[str, Any]]:
    """Those that come again: any regex, and schemas of more than a literal."""
    found: list[dict[str, Any]] = [{"regex": random_regex(draw)} for _ in range(KNOWN // 2)]
    while len(found) < KNOWN:
        schema = random_schema(draw)
        if schema.get("type") in ("object", "array"):
            found.append({"json": schema})
    return found


def free_request(place: int) -> TextRequest:
    """The same one whenever it is asked for."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, seed=place)
    return TextRequest(
        prompt=f"Once upon a time there was a prince who had {place} sisters and no brothers.", params=params
    )


Bits = tuple[tuple[int, float], ...]
"""Tokens and their log probabilities."""


@dataclasses.dataclass(kw_only=True)
class Running:
    """form: None of a free request, which should say `alone`. gives_up: with this many tokens."""

    stream: TextStream
    form: dict[str, Any] | None
    alone: Bits
    gives_up: int
    text: str = ""
    bits: Bits = ()


class Storm:
    """counts: of requests, by what became of them."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer, seed: int) -> None:
        self._runner, self._tokenizer, self._draw = runner, tokenizer, random.Random(seed)
        self._outlet, self._running, self.counts = Outlet(), dict[Request, Running](), Counter[str]()
        self._alone = [self._complete(free_request(place)) for place in range(FREE)]
        self._known = known_forms(self._draw)

    def run(self, count: int) -> None:
        """That many requests, AT_ONCE at a time, half of them together. Raises AssertionError for a wrong answer."""
        half = AT_ONCE // 2
        for begin in range(0, count, half):
            made = [found for _ in range(min(half, count - begin)) if (found := self._make()) is not None]
            while len(self._running) > half:
                self._read()
            self._begin(made)
        while self._running:
            self._read()

    def _complete(self, asked: TextRequest) -> Bits:
        return tuple(pair for event in stream_text(self._runner, self._tokenizer, [asked]) for pair in bits(event))

    def _make(self) -> Running | None:
        """A request that has not begun; None: it is refused."""
        draw = self._draw
        place, kind = draw.randrange(FREE), draw.random()
        form = None if kind < 0.25 else draw.choice(self._known) if kind < 0.6 else random_form(draw)
        asked = free_request(place)
        if form is not None:
            asked = dataclasses.replace(asked, params=dataclasses.replace(asked.params, structured_outputs=form))
        try:
            (stream,) = make_streams(self._runner, self._tokenizer, 0, asked)
        except RequestError:
            self.counts["refused"] += 1
            assert form is not None, "a free request is fine"
            return None
        assert form not in WRONG, "what cannot be enforced is refused"
        gives_up = draw.randrange(8) if form is not None and draw.random() < 0.5 else MAX_TOKENS + 1
        return Running(stream=stream, form=form, alone=self._alone[place], gives_up=gives_up)

    def _begin(self, made: list[Running]) -> None:
        self._running |= {each.stream.request: each for each in made}
        self._runner.executor.add([each.stream.request for each in made], self._outlet)
        for each in made:
            if each.gives_up == 0:
                self._give_up(each.stream.request)

    def _give_up(self, request: Request) -> None:
        self._runner.executor.abort([request])
        del self._running[request]
        self.counts["given up"] += 1

    def _read(self) -> None:
        for progress in self._outlet.get_all():
            if (found := self._running.get(progress.request)) is None:
                continue  # given up
            event = found.stream.next_event(progress)
            found.text, found.bits = found.text + event.text, (*found.bits, *bits(event))
            assert event.error is None, event.error
            if event.finish_reason is not None:
                del self._running[progress.request]
                self._check(found, event.finish_reason)
            elif len(found.bits) >= found.gives_up:
                self._give_up(progress.request)

    def _check(self, found: Running, reason: FinishReason) -> None:
        if found.form is None:
            assert found.bits == found.alone, "guided neighbours change no bits"
            self.counts["free"] += 1
        elif reason is FinishReason.LENGTH:
            self.counts["guided, cut at max_tokens"] += 1
        else:
            self.counts["guided, whole"] += 1
            regex = found.form.get("regex")
            assert regex is None or re.fullmatch(regex, found.text), (regex, found.text)
            assert regex is not None or fits(json.loads(found.text), found.form["json"]), (found.form, found.text)


def bits(event: TextEvent) -> Bits:
    """What is new."""
    return tuple(zip(event.token_ids, event.log_probs, strict=True))


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """resident: MB after a quarter, and at the end. left: what must be nothing. cache: the kept grammars."""

    counts: Counter[str]
    preemptions: int
    resident: list[float]
    left: dict[str, int]
    cache: GrammarCache


def storm(engine: Path, count: int, seed: int) -> Result:
    """See Result."""
    resident = []
    with ModelRunner.from_dir(engine, kv_cache_memory=KV_CACHE_MEMORY) as runner:
        requests = Storm(runner, Tokenizer.from_dir(engine), seed)
        for part in (count // 4, count - count // 4):
            requests.run(part)
            resident.append(resident_mb())
        stats = runner.stats()
        left = {"blocks": stats["blocks_used"], "running": stats["requests_running"]}
        left["waiting"] = stats["requests_waiting"]
        return Result(
            counts=requests.counts,
            preemptions=stats["preemptions"],
            resident=resident,
            left=left,
            cache=runner.guides.cache,
        )


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    with counted_handles() as handles:
        found = storm(options.engine, options.requests, options.seed)
        gc.collect()
        left = {**found.left, "handles beside the kept grammars": handles() - len(found.cache)}
    left["requests"] = sum(type(each) is Request for each in gc.get_objects())
    seconds = time.perf_counter() - begin
    print(f"{found.counts.total()} requests in {seconds:.0f} s: {dict(sorted(found.counts.items()))}")
    print(f"preempted: {found.preemptions}")
    print(f"resident: {found.resident[0]:.0f} MB after a quarter, {found.resident[1]:.0f} MB at the end")
    print(f"left: {left}")
    assert not any(left.values()), left


if __name__ == "__main__":
    main()
