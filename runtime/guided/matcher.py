"""Grammars as the library holds them: compiled once, cloned for each sequence."""

import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from ingot.errors import RequestError
from ingot.runtime.guided.library import Library
from ingot.step_io import UInt32

if TYPE_CHECKING:  # token ids alone need no tokenizer
    from ingot.runtime.guided.grammar_tokenizer import GrammarTokenizer

_NATIVE = ("llg_matcher_reset", "llg_matcher_consume_token", "llg_matcher_compute_mask_into", "llg_matcher_is_stopped")
_MOST_TEXT = 1 << 20  # bytes of a grammar
_KEPT = 128  # compiled grammars
_SECONDS = 10.0  # for one to be compiled
_AT_ONCE = 4  # that are compiled, those that nobody waits for any more included


class Matcher:
    """A grammar and how far it has come: see step_io.Grammar."""

    def __init__(self, library: Library, tokenizer: "GrammarTokenizer", handle: int) -> None:
        self._library, self._tokenizer, self._handle = library, tokenizer, handle
        self._bytes = int(library.call("llg_matcher_get_mask_byte_size", handle))
        addresses = [library.address(name) for name in _NATIVE]
        self.native = (handle, addresses[0], addresses[1], addresses[2], addresses[3], self._bytes // 4)
        weakref.finalize(self, library.call, "llg_free_matcher", handle).atexit = False

    def reset(self) -> bool:
        """See Grammar."""
        return bool(self._library.call("llg_matcher_reset", self._handle) == 0)

    def allowed(self) -> UInt32:
        """See Grammar."""
        mask = np.zeros(self._bytes // 4, np.uint32)
        if self._library.call("llg_matcher_compute_mask_into", self._handle, mask.ctypes.data, self._bytes):
            mask[:] = 0
        return mask

    def consume(self, token: int) -> bool:
        """See Grammar."""
        failed = self._library.call("llg_matcher_consume_token", self._handle, token)
        return not failed and bool(self._library.call("llg_matcher_is_stopped", self._handle))

    def clone(self) -> "Matcher":
        """At the same place. Not while another thread is at it."""
        return Matcher(self._library, self._tokenizer, int(self._library.call("llg_clone_matcher", self._handle)))

    @property
    def error(self) -> str | None:
        """Why it has failed, in the library's words."""
        words = self._library.call("llg_matcher_get_error", self._handle)
        return None if words is None else str(words.decode(errors="replace"))


class GrammarCache:
    """Text of grammars → matchers at their beginning, the ones used last. Thread-safe."""

    def __init__(self, library: Library, tokenizer: "GrammarTokenizer") -> None:
        self._library, self.tokenizer = library, tokenizer
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._compilers = threading.BoundedSemaphore(_AT_ONCE)

    def __len__(self) -> int:
        """How many grammars are kept."""
        return len(self._made)

    def new(self, kind: str, text: str) -> Matcher:
        """A matcher of its own. kind: the library's, "json_schema", "regex", "lark". Raises RequestError."""
        with self._lock:
            found = self._made.get((kind, text))
            if found is not None:
                self._made.move_to_end((kind, text))
                return found.clone()
        made = self._compile(kind, text)
        with self._lock:
            self._made[kind, text] = made
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
            return made.clone()

    def problem(self, kind: str, text: str) -> str | None:
        """Why a grammar is none, or None."""
        return self._library.validate(self.tokenizer.init, kind, text)

    def _compile(self, kind: str, text: str) -> Matcher:
        data = text.encode(errors="replace")
        if len(data) > _MOST_TEXT:
            raise RequestError(
                "structured_outputs: the grammar is too long", expected=f"{_MOST_TEXT} bytes", got=f"{len(data)}"
            )
        if b"\0" in data:
            raise RequestError("structured_outputs: a grammar cannot hold the character U+0000")
        matcher = self._compile_in_time(kind.encode(), data)
        words = matcher.error
        if words is not None:
            raise RequestError("structured_outputs: llguidance refuses this", got=words[:1000])
        return matcher

    def _compile_in_time(self, kind: bytes, data: bytes) -> Matcher:
        """On a thread of its own: the library cannot be stopped, so what takes too long goes on, and nobody waits."""
        if not self._compilers.acquire(timeout=_SECONDS):
            raise RequestError(
                "structured_outputs: other grammars are being compiled, and take long", hint="try again later"
            )
        made: list[Matcher] = []

        def work() -> None:
            try:
                handle = self._library.call("llg_new_matcher", self.tokenizer.init, kind, data)
                made.append(Matcher(self._library, self.tokenizer, int(handle)))
            finally:
                self._compilers.release()

        thread = threading.Thread(target=work, name="ingot grammar", daemon=True)
        thread.start()
        thread.join(_SECONDS)
        if not made:
            raise RequestError(
                "structured_outputs: the grammar takes too long to compile",
                expected=f"at most {_SECONDS:g} s",
                hint="make it smaller: thousands of properties or alternatives cost most",
            )
        return made[0]
