"""What takes the longer the larger a body or an answer is never runs on the event loop."""

import asyncio
import dataclasses
import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from ingot.runtime.event_queue import EventQueue, LoopBridge
from ingot.runtime.server import api_base, json_pieces, openai_format, response
from ingot.runtime.server.json_pieces import Rows, dump, json_blocks
from ingot.runtime.server.json_pieces import json_pieces as pieces_of
from ingot.runtime.server.text_offsets import TextOffsets
from ingot.runtime.text_stream import TextEvent
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.server.served import Served

LARGE = 16 << 10  # bytes, characters or tokens


@dataclasses.dataclass
class Watch:
    """Calls with large arguments or results, and whether they were on the loop."""

    loop: int
    beside: set[str] = dataclasses.field(default_factory=set)
    on_loop: set[str] = dataclasses.field(default_factory=set)

    def note(self, name: str, size: int) -> None:
        if size >= LARGE:
            (self.on_loop if threading.get_ident() == self.loop else self.beside).add(name)


def _size(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return 0


@pytest.fixture
def watch(served: Served, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Looks at everything that reads bodies and writes answers."""
    ready = threading.Event()
    found: list[int] = []

    def tell() -> None:
        found.append(threading.get_ident())
        ready.set()

    served.loop.call_soon_threadsafe(tell)
    assert ready.wait(20)
    watch = Watch(found[0])

    def spy(place: Any, name: str) -> None:
        real = getattr(place, name)

        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            result = real(*args, **options)
            watch.note(name, max(map(_size, (result, *args)), default=0))
            return result

        monkeypatch.setattr(place, name, call)

    for place, name in (
        (api_base, "read_body"),
        (json, "loads"),
        (json, "dumps"),
        (json_pieces, "dump"),
        (Tokenizer, "decode"),
        (Tokenizer, "encode"),
        (openai_format.CompletionChunkBuilder, "_of_prompt"),
        (openai_format.Scores, "json"),
    ):
        spy(place, name)
    real_blocks = json_pieces.json_blocks

    def write(value: Any) -> list[bytes]:
        blocks = real_blocks(value)
        watch.note("json_blocks", sum(map(len, blocks)))
        return blocks

    for module in (api_base, response):
        monkeypatch.setattr(module, "json_blocks", write)
    rows = openai_format.CompletionChunkBuilder._add

    def count(self: Any, scores: Any, *rest: Any) -> None:
        rows(self, scores, *rest)
        watch.note("rows", 100 * len(scores.tokens))

    monkeypatch.setattr(openai_format.CompletionChunkBuilder, "_add", count)
    return watch


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("path", "body", "beside"),
    [
        ("/v1/completions", {"prompt": "ab " * 9000}, {"read_body", "encode"}),
        ("/v1/completions", {"prompt": [7] * 20000}, {"read_body"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 900}, {"read_body"}),
        (
            "/v1/completions",
            {"prompt": list(range(5, 405)), "max_tokens": 0, "echo": True, "logprobs": 9},
            {"json_blocks", "rows"},
        ),
        (
            "/v1/completions",
            {"prompt": list(range(5, 405)), "max_tokens": 2, "echo": True, "logprobs": 9, "stream": True},
            {"json_blocks", "rows"},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 90, "logprobs": True, "top_logprobs": 20},
            {"json_blocks"},
        ),
        ("/tokenize", {"prompt": "ab " * 9000, "return_token_strs": True}, {"read_body", "encode", "json_blocks"}),
        ("/detokenize", {"tokens": [9] * 20000}, {"read_body", "decode"}),
    ],
)
def test_large_bodies_and_answers(
    served: Served, watch: Watch, path: str, body: dict[str, Any], beside: set[str]
) -> None:
    with served.http() as http:
        assert http.post(path, content=json.dumps(body).encode()).status_code in (200, 400)
    assert watch.on_loop == set()
    assert watch.beside >= beside


def test_probabilities_of_a_prompt_are_put_together_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = openai_format.CompletionChunkBuilder._add

    def count(self: Any, scores: Any, *rest: Any) -> None:
        seen.append(1)
        real(self, scores, *rest)

    monkeypatch.setattr(openai_format.CompletionChunkBuilder, "_add", count)
    body = {
        "prompt": list(range(5, 105)),
        "max_tokens": 2,
        "echo": True,
        "logprobs": 2,
        "n": 8,
        "seed": 1,
        "ignore_eos": True,
    }
    with served.http() as http:
        found = http.post("/v1/completions", json=body).json()
    assert len(seen) == 100 + 8 * 2
    for choice in found["choices"]:
        assert {len(column) for column in choice["logprobs"].values()} == {102}
        offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
        whole = [pair for pair in zip(offsets[1:], tokens[1:], strict=True) if "\ufffd" not in pair[1]]
        assert all(choice["text"].startswith(token, offset) for offset, token in whole)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[5] * 300] * 3, "max_tokens": 0, "echo": True, "logprobs": 20, "n": 100},
        {"prompt": "a", "max_tokens": 500, "logprobs": 20, "n": 128},
    ],
)
def test_an_answer_holds_so_many_probabilities(served: Served, body: dict[str, Any]) -> None:
    with served.http() as http:
        found = http.post("/v1/completions", json=body)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "logprobs")
    assert "may be at most 1048576" in found.json()["error"]["message"]


def test_json_in_pieces_is_json() -> None:
    def document(large: Callable[[Any], Any], rows: Callable[[Any], Any]) -> dict[str, Any]:
        return {
            "a": '\u00e9"\n',
            "b": None,
            "c": [],
            "d": {},
            "e": 1.5,
            "f": list(range(200)),
            "g": (1, "x"),
            "h": large([{"x": rows({"y": [n]} for n in range(130)), "z": large([])}, {"x": rows([]), "z": {}}]),
        }

    expected = json.dumps(document(list, list), ensure_ascii=False, separators=(",", ":")).encode()
    assert b"".join(pieces_of(document(iter, Rows))) == expected
    assert dump(document(iter, Rows)) == expected
    assert b"".join(json_blocks(document(iter, Rows))) == expected
    assert max(map(len, pieces_of(document(iter, Rows)))) < 1000
    blocks = json_blocks({"x": ["y" * 1000] * 1000})
    assert len(blocks) == 4
    with pytest.raises(ValueError, match="JSON compliant"):
        dump(float("nan"))


def test_a_reader_that_comes_late_takes_events_by_and_by() -> None:
    """However many there are, others have their turn in between."""

    async def read() -> list[str]:
        bridge, turns = LoopBridge(asyncio.get_running_loop()), []
        queue = EventQueue(bridge)

        async def other() -> None:
            for _ in range(3):
                turns.append("other")
                await asyncio.sleep(0)

        for index in range(600):
            queue.put(TextEvent(index=index))
        bridge.wake()
        task, got = asyncio.create_task(other()), 0
        while got < 600:
            events = await queue.drain()
            assert [event.index for _, event in events] == list(range(got, got + len(events)))
            got += len(events)
            turns.append(str(len(events)))
        await task
        queue.poke()
        assert await queue.drain() == []
        return turns

    turns = asyncio.run(read())
    assert [turn for turn in turns if turn != "other"] == ["256", "256", "88"]
    assert turns.index("other") < turns.index("88")


def test_a_step_wakes_the_loop_once() -> None:
    """However many requests it brought something. What comes while the loop is busy is there with what came before."""
    calls: list[Callable[[], None]] = []

    async def read() -> list[list[int]]:
        def call_soon(callback: Callable[..., None], *given: object) -> None:
            calls.append(functools.partial(callback, *given))

        loop = mock.create_autospec(asyncio.AbstractEventLoop, instance=True)
        loop.call_soon_threadsafe.side_effect = call_soon
        bridge = LoopBridge(loop)
        queues, taken = [EventQueue(bridge) for _ in range(3)], []
        for step in range(2):
            for queue in queues:
                queue.put(TextEvent(index=step))
            bridge.wake()
            assert len(calls) == step + 1
        for call in calls:
            call()
        for queue in queues:
            taken.append([event.index for _, event in await queue.drain()])
        bridge.wake()
        assert len(calls) == 2, "nothing was new"
        queues[0].put(TextEvent(index=2))
        bridge.wake()
        assert len(calls) == 3
        return taken

    assert asyncio.run(read()) == [[0, 1]] * 3


def fallback_tokenizer(folder: Path) -> Tokenizer:
    """Bytes that are decoded as in sentencepiece, each for itself where they are no character."""
    table = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "\u2581b": 257}
    hf = HfTokenizer(models.BPE(table, [], byte_fallback=True, unk_token="<0x00>"))
    hf.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    hf.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_dir(folder)


def test_places_after_bytes_that_are_no_character(tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    (tmp_path / "fallback").mkdir()
    bytewise, fallback = byte_tokenizer(tmp_path / "bytes", 60), fallback_tokenizer(tmp_path / "fallback")
    halves = dict(zip((b"\xc3", b"\xa9", b"\xe4", b"\xbd", b"\xa0"), range(55, 60), strict=True))
    for data, places in (
        (b"\xc3!", [0, 1]),
        (b"!\xc3!", [0, 1, 2]),
        (b"\xc3\xa9!", [0, 0, 1]),
        (b"\xe4\xbd!", [0, 0, 1]),
        (b"\xe4\xbd\xa0!", [0, 0, 0, 1]),
        (b"\xc3\xc3!", [0, 1, 2]),
        (b"\xa9!", [0, 1]),
        (b"\xe4\xc3\xa9!", [0, 1, 1, 2]),
        (b"\xa9\xa9\xe4\xbd\xe4!!", [0, 1, 2, 2, 3, 4, 5]),
    ):
        ids = [halves.get(bytes([byte]), 0) for byte in data]
        offsets, text = TextOffsets(bytewise, skip_special_tokens=True), bytewise.decode(ids)
        assert [offsets.place(token) for token in ids] == places, data
        assert all(text[place] == "!" for token, place in zip(ids, places, strict=True) if token == 0)
    for data, places in ((b"\xe4\xbda", [0, 0, 2]), (b"\xc3\xa9a", [0, 0, 1]), (b"\xe4\xbd\xa0a", [0, 0, 0, 1])):
        ids = [256 if byte == ord("a") else byte for byte in data]
        offsets, text = TextOffsets(fallback, skip_special_tokens=True), fallback.decode(ids)
        assert [offsets.place(token) for token in ids] == places, data
        assert text[places[-1]] == "a"
    forked = TextOffsets(bytewise, skip_special_tokens=True)
    forked.place(halves[b"\xc3"])
    assert [forked.copy().place(halves[b"\xa9"]), forked.copy().place(0)] == [0, 1]
    assert TextOffsets(fallback, "b", skip_special_tokens=True).place(257) == 0
    bare = TextOffsets(fallback, "ba", skip_special_tokens=True)
    assert [bare.place(257), bare.place(256)] == [0, 1]


def test_events_for_a_closed_loop_go_nowhere() -> None:
    async def make() -> tuple[LoopBridge, EventQueue]:
        bridge = LoopBridge(asyncio.get_running_loop())
        return bridge, EventQueue(bridge)

    bridge, queue = asyncio.run(make())
    queue.put(TextEvent(index=0))
    bridge.wake()


def test_events_of_many_steps_arrive_once_and_in_order() -> None:
    """From a thread that does not wait for the loop, while readers drain."""

    async def read() -> list[list[int]]:
        bridge = LoopBridge(asyncio.get_running_loop())
        queues = [EventQueue(bridge) for _ in range(4)]

        def write() -> None:
            for step in range(3000):
                queues[step % 4].put(TextEvent(index=step))
                queues[(step + 1) % 4].put(TextEvent(index=step))
                if step % 3 == 0:
                    bridge.wake()
            bridge.wake()

        async def drained(queue: EventQueue) -> list[int]:
            found: list[int] = []
            while len(found) < 1500:
                found += [event.index for _, event in await queue.drain()]
            return found

        thread = threading.Thread(target=write)
        thread.start()
        found = await asyncio.gather(*map(drained, queues))
        thread.join()
        return found

    expected = [sorted([*range(at, 3000, 4), *range((at - 1) % 4, 3000, 4)]) for at in range(4)]
    assert asyncio.run(read()) == expected
