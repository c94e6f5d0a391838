"""JSON values → bytes, in pieces: no call of the encoder, which keeps all other threads waiting, takes long.

{                 an object, piece by piece                  {"usage": {...}, "choices":
[ iterator ]      of large elements, each piece by piece     [{"text": ..., "logprobs": {"tokens":
[ list, Rows ]    of small elements, 64 at a time            ["a", "b", ...]}}, ...]}
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_AT_ONCE = 64  # small elements
_BLOCK = 256 << 10  # bytes
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list)


class Rows:
    """A list of small elements, each of which is made when it is written."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def json_pieces(value: Any) -> Iterator[bytes]:
    """See above."""
    if isinstance(value, dict):
        yield b"{"
        for place, (key, each) in enumerate(value.items()):
            yield (b"," if place else b"") + dump(key) + b":"
            yield from json_pieces(each)
        yield b"}"
    elif isinstance(value, (Rows, Sequence)) and not isinstance(value, str):
        rows, comma = iter(value), b""
        yield b"["
        while some := list(itertools.islice(rows, _AT_ONCE)):
            yield comma + dump(some)[1:-1]
            comma = b","
        yield b"]"
    elif isinstance(value, Iterator):
        yield b"["
        for place, each in enumerate(value):
            yield b"," if place else b""
            yield from json_pieces(each)
        yield b"]"
    else:
        yield dump(value)


def json_blocks(value: Any) -> list[bytes]:
    """The same, put together as it is sent best."""
    blocks: list[bytes] = []
    pieces: list[bytes] = []
    size = 0
    for piece in json_pieces(value):
        pieces.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            blocks.append(b"".join(pieces))
            pieces, size = [], 0
    return [*blocks, b"".join(pieces)]


def dump(value: Any) -> bytes:
    """All at once: for what is small."""
    return _ENCODER.encode(value).encode()
