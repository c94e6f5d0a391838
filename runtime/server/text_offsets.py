"""Tokens of a text, one by one → where in it each of them begins, in characters."""

import codecs

from ingot.runtime.tokenizer import Tokenizer


class TextOffsets:
    """Tokens that are parts of one character stand where it stands; bytes that are not characters stand for U+FFFD.

    begins_with          what the text is known to begin with: the first word of a text has no space before it in some
                         tokenizers
    skip_special_tokens  special tokens are not text
    """

    def __init__(self, tokenizer: Tokenizer, begins_with: str | None = None, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._begins_with, self._skip = tokenizer, begins_with, skip_special_tokens
        self._length = 0  # characters so far
        self._pending = b""  # bytes of a character that is not whole yet

    def place(self, token: int) -> int:
        """Where the next token begins."""
        if self._skip and token in self._tokenizer.special_ids:
            return self._length
        data = self._tokenizer.token_bytes(token)
        if data and not _may_go_on(self._pending, data[:1]):
            self._length += len(self._pending) if self._tokenizer.halves_apart else 1
            self._pending = b""
        begin = self._length
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        added = decoder.decode(self._pending + data)
        self._pending = decoder.getstate()[0]
        is_bare = begin == 0 and self._begins_with is not None and not self._begins_with.startswith(added)
        self._length += len(added.removeprefix(" ") if is_bare else added)
        return begin

    def go_on_after(self, text: str) -> None:
        """What follows stands behind this text. Bytes that wait for the rest of their character come with the rest."""
        self._length = len(text)

    def copy(self) -> "TextOffsets":
        """At the same place of the same text."""
        other = TextOffsets(self._tokenizer, self._begins_with, skip_special_tokens=self._skip)
        other._length, other._pending = self._length, self._pending
        return other


def _may_go_on(pending: bytes, following: bytes) -> bool:
    """Whether this byte completes or continues the character whose first bytes these are."""
    try:
        (pending + following).decode()
    except UnicodeDecodeError as error:
        return not pending or error.reason == "unexpected end of data"
    return True
