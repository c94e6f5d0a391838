"""Which blocks of tokens the prefix cache has, told to readers in other threads, such as routers.

    engine thread   a block is sealed or forgotten ──▶ BlockEvents ──▶ what each reader has not fetched yet
    event loop      BlockReader.fetch: what has changed since the last call

A key says which tokens a block holds, and which came before it:

    root = SHA-256(cache_salt in UTF-8; empty without one)
    key of block n = SHA-256(key of block n - 1, or the root + token ids of the block, int32, little endian)
"""

import dataclasses
import threading

MOST_PENDING = 1 << 16  # changes that wait for a reader: a slower one begins again


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockChanges:
    """number: of all changes up to these. A key that came and went again is in `removed` alone."""

    number: int
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class BlockReader:
    """keys: what the cache had when the reader came. lost: more has changed than is kept for it."""

    def __init__(self, events: "BlockEvents", number: int, keys: tuple[bytes, ...]) -> None:
        self.number, self.keys, self.lost = number, keys, False
        self._events, self._pending = events, dict[bytes, bool]()  # key → whether it is there

    def note(self, key: bytes, *, there: bool) -> None:
        """A key came or went. With the lock of the events held."""
        self._pending[key] = there
        if len(self._pending) > MOST_PENDING:
            self.lost = True
            self._pending.clear()

    def fetch(self) -> BlockChanges:
        """What has changed since the last call."""
        with self._events.lock:
            pending, self._pending, number = self._pending, {}, self._events.number
        return BlockChanges(
            number=number,
            stored=tuple(key for key, there in pending.items() if there),
            removed=tuple(key for key, there in pending.items() if not there),
        )

    def close(self) -> None:
        """Hear no more."""
        with self._events.lock:
            self._events.readers.discard(self)


class BlockEvents:
    """The keys of one cache group.

    number  of changes so far
    """

    def __init__(self) -> None:
        self.lock, self.number = threading.Lock(), 0
        self.readers: set[BlockReader] = set()
        self._keys: dict[bytes, None] = {}

    def stored(self, key: bytes) -> None:
        """The cache has these tokens from now on."""
        self._change(key, there=True)

    def removed(self, key: bytes) -> None:
        """The cache has them no more."""
        self._change(key, there=False)

    def read(self) -> BlockReader:
        """From any thread. The reader hears of every change after the keys that it is given."""
        with self.lock:
            reader = BlockReader(self, self.number, tuple(self._keys))
            self.readers.add(reader)
        return reader

    def _change(self, key: bytes, *, there: bool) -> None:
        with self.lock:
            self.number += 1
            if there:
                self._keys[key] = None
            else:
                self._keys.pop(key, None)
            for reader in self.readers:
                reader.note(key, there=there)
