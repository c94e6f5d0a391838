"""Grammars as the library holds them: compiled once, then used again by one sequence after the other, or cloned."""

import contextlib
import ctypes
import os
import re
import threading
import weakref
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np

from ingot.errors import RequestError
from ingot.runtime.guided.forced_texts import released
from ingot.runtime.guided.library import Library
from ingot.step_io import Int32, UInt32

if TYPE_CHECKING:  # token ids alone need no tokenizer
    from ingot.runtime.guided.grammar_tokenizer import GrammarTokenizer

_NATIVE = (
    "llg_matcher_reset",
    "llg_matcher_consume_token",
    "llg_matcher_compute_mask_into",
    "llg_matcher_is_stopped",
    "llg_matcher_rollback",
)
_MOST_TEXT = 1 << 20  # bytes of a grammar
_KEPT = 128  # compiled grammars
_MOST_IDLE = 4  # matchers of one of them that wait for a sequence
_SECONDS = 10.0  # for one to be compiled
_SOON = 0.05  # seconds after which a compilation yields to the threads that compute steps
_NICENESS = 5  # then: a third of what they get
_AT_ONCE = 4  # that are compiled, those that nobody waits for any more included
_TRIED = 4  # tokens of an answer before a request takes a grammar
_OF_PATTERN = re.compile(r"regex parse error:\n    [^\n]*\n    (?P<marks> *\^)[ ^]*\nerror: (?P<reason>[^\n]+)")
_NO_TOKEN = "NoExtension"  # how the library begins to say that no token fits


class _Handle:
    """A matcher of the library, freed with this object. The tokenizer lives as long."""

    def __init__(self, library: Library, tokenizer: "GrammarTokenizer", address: int) -> None:
        self.library, self.tokenizer, self.address = library, tokenizer, address
        self.mask_bytes = int(library.call("llg_matcher_get_mask_byte_size", address))
        weakref.finalize(self, library.call, "llg_free_matcher", address).atexit = False

    def clone(self) -> "_Handle":
        """At the same place. Not while another thread is at it."""
        return _Handle(self.library, self.tokenizer, int(self.library.call("llg_clone_matcher", self.address)))

    def reset(self) -> bool:
        """Whether it is at its beginning again."""
        return bool(self.library.call("llg_matcher_reset", self.address) == 0)

    def allowed(self) -> UInt32:
        """See Grammar."""
        mask = np.zeros(self.mask_bytes // 4, np.uint32)
        if self.library.call("llg_matcher_compute_mask_into", self.address, mask.ctypes.data, self.mask_bytes):
            mask[:] = 0
        return mask

    def consume(self, token: int) -> bool:
        """See Grammar."""
        failed = self.library.call("llg_matcher_consume_token", self.address, token)
        return not failed and bool(self.library.call("llg_matcher_is_stopped", self.address))

    def rollback(self, count: int) -> bool:
        """See Grammar."""
        return bool(self.library.call("llg_matcher_rollback", self.address, count) == 0)

    def fitting(self, tokens: Int32) -> int:
        """How many of these may follow, one behind the other."""
        given = (ctypes.c_uint32 * len(tokens))(*tokens.tolist())
        return max(int(self.library.call("llg_matcher_validate_tokens", self.address, given, len(tokens))), 0)

    def forced(self, most: int) -> list[int]:
        """Tokens that write the only text that may follow, at most `most`."""
        found = (ctypes.c_uint32 * most)()
        count = int(self.library.call("llg_matcher_compute_ff_tokens", self.address, found, most))
        return list(found[: max(count, 0)])

    @property
    def error(self) -> str | None:
        """Why it has failed, in the library's words."""
        words = self.library.call("llg_matcher_get_error", self.address)
        return None if words is None else str(words.decode(errors="replace"))


_Idle = deque[_Handle]
"""Those of one grammar that are at its beginning. Threads that drop a matcher append without a lock."""


class Matcher:
    """A grammar and how far it has come: see step_io.Grammar. Once it is dropped, its handle serves another one."""

    def __init__(self, handle: _Handle, idle: _Idle) -> None:
        self._handle, self._idle = handle, idle
        reset, consume, fill, is_stopped, rollback = (handle.library.address(name) for name in _NATIVE)
        self.native = (handle.address, reset, consume, fill, is_stopped, rollback, handle.mask_bytes // 4)
        weakref.finalize(self, _give_back, handle, idle).atexit = False

    def reset(self) -> bool:
        """See Grammar."""
        return self._handle.reset()

    def allowed(self) -> UInt32:
        """See Grammar."""
        return self._handle.allowed()

    def consume(self, token: int) -> bool:
        """See Grammar."""
        return self._handle.consume(token)

    def rollback(self, count: int) -> bool:
        """See Grammar."""
        return self._handle.rollback(count)

    def fitting(self, tokens: Int32) -> int:
        """How many of these tokens may follow, one behind the other. Not while a step runs."""
        return self._handle.fitting(tokens)

    def forced(self, most: int) -> list[int]:
        """Tokens that write the only text that may follow, at most `most`. Not while a step runs."""
        return self._handle.forced(most)

    def clone(self) -> "Matcher":
        """At the same place. Not while another thread is at it."""
        return Matcher(self._handle.clone(), self._idle)

    @property
    def error(self) -> str | None:
        """Why it has failed, in the library's words."""
        return self._handle.error


def _give_back(handle: _Handle, idle: _Idle) -> None:
    """What it has learned of its grammar makes the next answer's masks cheaper. What has failed is of no use."""
    if handle.reset():
        idle.append(handle)


def _begin(handle: _Handle) -> _Idle | str:
    """Matchers at the beginning, or why there are none: also what fails within a few tokens. The first mask costs most,
    and the handle keeps what was made for it, so that no step waits for it.
    """
    mask = handle.allowed() if handle.error is None else np.zeros(0, np.uint32)
    if handle.error is not None:
        return handle.error
    idle, tried = deque([handle], maxlen=_MOST_IDLE), handle.clone()
    for _ in range(_TRIED):
        (words,) = mask.nonzero()
        if not words.size:
            break
        low = int(mask[words[0]])
        if tried.consume(int(words[0]) * 32 + (low & -low).bit_length() - 1):
            break
        mask = tried.allowed()
    error = tried.error
    if error is not None and not error.startswith(_NO_TOKEN):
        return error
    _give_back(tried, idle)
    return idle


class GrammarCache:
    """Text of grammars → matchers at their beginning, the ones used last. Thread-safe."""

    def __init__(self, library: Library, tokenizer: "GrammarTokenizer") -> None:
        self._library, self.tokenizer = library, tokenizer
        self._lock = threading.Lock()
        self._made: OrderedDict[tuple[str, str], _Idle] = OrderedDict()
        self._compilers = threading.BoundedSemaphore(_AT_ONCE)

    def __len__(self) -> int:
        """How many matchers wait for a sequence."""
        with self._lock:
            return sum(map(len, self._made.values()))

    def new(self, kind: str, text: str) -> Matcher:
        """A matcher of its own. kind: the library's, "json_schema", "regex", "lark". Raises RequestError."""
        with self._lock:
            idle = self._made.get((kind, text))
            if idle is not None:
                self._made.move_to_end((kind, text))
                return self._take(idle)
        idle = self._compile(kind, text)
        with self._lock:
            self._made[kind, text] = idle
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
            return self._take(idle)

    def _take(self, idle: _Idle) -> Matcher:
        """With the lock held. One always stays, for clones."""
        handle = idle.pop()
        if not idle:
            idle.append(handle)
            handle = handle.clone()
        return Matcher(handle, idle)

    def problem(self, kind: str, text: str) -> str | None:
        """Why a grammar is none, or None."""
        return self._library.validate(self.tokenizer.init, kind, text)

    def _compile(self, kind: str, text: str) -> _Idle:
        data = text.encode(errors="replace")
        if len(data) > _MOST_TEXT:
            raise RequestError(
                "structured_outputs: the grammar is too long", expected=f"{_MOST_TEXT} bytes", got=f"{len(data)}"
            )
        if b"\0" in data:
            raise RequestError("structured_outputs: a grammar cannot hold the character U+0000")
        asked, (kind, text) = kind, released(kind, text, self.tokenizer.tokens.values())
        made = self._compile_in_time(kind.encode(), text.encode(errors="replace"))
        if isinstance(made, str):
            raise RequestError("structured_outputs: llguidance refuses this", got=_without_grammar(asked, made))
        return made

    def _compile_in_time(self, kind: bytes, data: bytes) -> _Idle | str:
        """See _begin. On a thread of its own: the library cannot be stopped, so what takes too long
        goes on, and nobody waits.
        """
        if not self._compilers.acquire(timeout=_SECONDS):
            raise RequestError(
                "structured_outputs: other grammars are being compiled, and take long", hint="try again later"
            )
        made: list[_Idle | str] = []

        def work() -> None:
            try:
                address = self._library.call("llg_new_matcher", self.tokenizer.init, kind, data)
                made.append(_begin(_Handle(self._library, self.tokenizer, int(address))))
            finally:
                self._compilers.release()

        thread = threading.Thread(target=work, name="ingot grammar", daemon=True)
        thread.start()
        thread.join(_SOON)
        if thread.is_alive():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, _NICENESS)
            thread.join(_SECONDS)
        if not made:
            raise RequestError(
                "structured_outputs: the grammar takes too long to compile",
                expected=f"at most {_SECONDS:g} s",
                hint="make it smaller: thousands of properties or alternatives cost most",
            )
        return made[0]


def _without_grammar(kind: str, message: str) -> str:
    """Why the library refuses a text. It makes a grammar of a pattern, which its message shows too."""
    found = _OF_PATTERN.search(message) if kind == "regex" else None
    return f"{found['reason']}, at character {len(found['marks'])} of the pattern" if found else message[:1000]
