"""Text that comes piece by piece, read by generators: each asks for what it needs and yields where more must come.

So results do not depend on where the pieces end: a decision is made when everything that it depends on is there.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

Emit = Callable[[str], None]
Wait = Generator[None, None, Any]

_COMPACT = 1 << 16
_STRING_PART = re.compile(r'["\\]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_VALUE_PART = re.compile(r'["{}\[\]\ud800-\udfff]')
_SCALAR_END = re.compile(r"[\s,\]}\ud800-\udfff]")


def no_text(text: str) -> None:
    """Drops it."""


class Scanner:
    """The text that is not yet read. `push` and `end` are the producer's, all else is for generators.

    cut  it has ended because a limit was reached
    """

    def __init__(self, plain: Callable[[str], str]) -> None:
        """plain: text with the letters of the markers in it."""
        self.plain = plain
        self._text, self._at, self._ended = "", 0, False
        self._kept: int | None = None  # from here on text may be put back
        self.cut = False

    def push(self, text: str) -> None:
        """More of it."""
        self._text += text

    def end(self, *, cut: bool) -> None:
        """There will be no more. cut: a limit was reached; else the model wanted to end here."""
        self._ended, self.cut = True, cut

    def keep(self) -> None:
        """Remember the place."""
        self._compact()
        self._kept = self._at

    def take_back(self) -> str:
        """What was read since `keep`; it counts as read."""
        assert self._kept is not None, "nothing was kept"
        text = self._text[self._kept : self._at]
        self._kept = None
        return text

    def forget(self) -> None:
        """Nothing is put back any more."""
        self._kept = None

    def drop(self) -> None:
        """Read all that is there, for nobody."""
        self._at = len(self._text)

    def one(self) -> str:
        """Read the next character, which is there."""
        self._at += 1
        return self.plain(self._text[self._at - 1])

    def put_back(self, text: str) -> None:
        """What was read last."""
        self._at -= len(text)

    def more(self) -> Wait:
        """Wait for text. False: there is no more."""
        if self._ended:
            return False
        self._compact()
        yield
        return True

    def need(self, count: int) -> Wait:
        """Whether so many characters follow."""
        while len(self._text) - self._at < count:
            if not (yield from self.more()):
                return False
        return True

    def peek(self) -> Wait:
        """The next character, or "" at the end."""
        return self._text[self._at] if (yield from self.need(1)) else ""

    def skip(self, characters: str = " \t\r\n") -> Wait:
        """Read over these; returns what was read."""
        found = []
        while (each := (yield from self.peek())) and each in characters:
            found.append(each)
            self._at += 1
        return "".join(found)

    def accept(self, text: str) -> Wait:
        """Read this text if it follows. Whether it did."""
        for count in range(1, len(text) + 1):
            if not (yield from self.need(count)) or self._text[self._at + count - 1] != text[count - 1]:
                return False
        self._at += len(text)
        return bool(text)

    def follows(self, text: str) -> Wait:
        """As `accept`, and reads nothing."""
        if (yield from self.accept(text)):
            self._at -= len(text)
            return True
        return False

    def cut_inside(self, texts: Sequence[str]) -> bool:
        """Whether a limit was reached before one of these could be read, or in the middle of one."""
        rest = self._text[self._at :]
        return self.cut and any(len(each) > len(rest) and each.startswith(rest) for each in texts)

    def until(self, ends: Sequence[str], emit: Emit, *, certain_only: bool = False) -> Wait:
        """Give out the text before the first of these, and read that one: of several at a place the longest. Returns
        it, or "" where the text ends. certain_only: where a limit was reached in what may be an end, that is dropped.
        """
        while True:
            rest = self._text[self._at :]
            whole = self._ended and not (certain_only and self.cut)
            certain = len(rest) - (0 if whole else _overlap(rest, ends))
            place, _, found = min(
                ((place, -len(end), end) for end in ends if (place := rest.find(end)) >= 0), default=(len(rest), 0, "")
            )
            decided = bool(found) and place < certain
            stop = place if decided else certain
            if stop:
                emit(self.plain(rest[:stop]))
            self._at += stop + (len(found) if decided else 0)
            if decided:
                return found
            if not (yield from self.more()):
                if certain == len(rest) or (certain_only and self.cut):
                    self._at = len(self._text)
                    return ""
                return (yield from self.until(ends, emit))

    def json_string(self, emit: Emit) -> Wait:
        """A JSON string, quotes included, as it stands; characters that JSON forbids are escaped. Whether it ended."""
        if not (yield from self.accept('"')):
            return False
        emit('"')
        while True:
            found = _STRING_PART.search(self._text, self._at)
            stop = len(self._text) if found is None else found.start()
            if stop > self._at:
                emit(_CONTROL.sub(_escaped, self.plain(self._text[self._at : stop])))
                self._at = stop
            if found is None:
                if not (yield from self.more()):
                    return False
            elif found[0] == '"':
                self._at += 1
                emit('"')
                return True
            else:
                if not (yield from self.need(2)):
                    return False
                emit(_CONTROL.sub(_escaped, self.plain(self._text[self._at : self._at + 2])))
                self._at += 2

    def json_value(self, emit: Emit) -> Wait:
        """Any JSON value as it stands, up to its end or a marker outside of strings. Whether it ended."""
        depth = 0
        yield from self.skip()
        while True:
            each = yield from self.peek()
            if not each or "\ud800" <= each <= "\udfff":
                return False
            if each == '"':
                if not (yield from self.json_string(emit)):
                    return False
            elif each in "{[":
                depth += 1
                emit(each)
                self._at += 1
            elif each in "}]":
                if depth == 0:
                    return False
                depth -= 1
                emit(each)
                self._at += 1
            elif depth == 0:
                return (yield from self._scalar(emit))
            else:
                self._between(emit)
            if depth == 0:
                return True

    def _between(self, emit: Emit) -> None:
        """Commas, colons, numbers and white space inside a value."""
        begin = self._at
        found = _VALUE_PART.search(self._text, self._at)
        self._at = len(self._text) if found is None else found.start()
        emit(self._text[begin : self._at])

    def _scalar(self, emit: Emit) -> Wait:
        """A number, true, false or null, outside of everything."""
        found: list[str] = []
        while (each := (yield from self.peek())) and not _SCALAR_END.match(each):
            found.append(each)
            self._at += 1
        text = "".join(found)
        try:
            json.loads(text)
        except ValueError:
            emit(json.dumps(text))
            return False
        emit(text)
        return True

    def _compact(self) -> None:
        """Drop what has been read."""
        if self._at > _COMPACT and self._kept is None:
            self._text, self._at = self._text[self._at :], 0


def _overlap(text: str, ends: Sequence[str]) -> int:
    """Length of the longest beginning of an end, not all of it, that the text ends with."""
    longest = min(max(map(len, ends), default=1) - 1, len(text))
    beginnings = (count for count in range(longest, 0, -1))
    return next((n for n in beginnings if any(len(end) > n and text.endswith(end[:n]) for end in ends)), 0)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
