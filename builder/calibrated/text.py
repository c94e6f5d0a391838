"""A calibration text → windows of tokens, each a sequence of its own."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ingot.checkpoint import Checkpoint
from ingot.companions import TOKENIZER_FILE, read_tokenizer
from ingot.configs.token_ids import read_token_ids
from ingot.errors import UsageError

BUILTIN = Path(__file__).with_name("text.txt")
WINDOW = 512  # tokens, at most; a multiple of 16, since a window is a block of keys and values
_LEAST = 16  # tokens of a whole text


def windows_of(
    checkpoint: Checkpoint, texts: Sequence[str], vocab_size: int, positions: int, count: int
) -> list[list[int]]:
    """At most `count` tokens, spread over the texts' beginnings. Every window starts with the model's first token.

    Raises UsageError where there is no tokenizer, or the texts have hardly a token of its vocabulary.
    """
    path = checkpoint.path / TOKENIZER_FILE
    if not path.is_file():
        raise UsageError(
            "a calibration text needs the model's tokenizer",
            where=str(path),
            hint="put the model's tokenizer.json beside its weights",
        )
    tokenizer, bos = read_tokenizer(path), read_token_ids(checkpoint.path).bos
    first = [] if bos is None else [bos]
    size = min(WINDOW, positions) - len(first)
    found: list[list[int]] = []
    left = count
    for text in texts:
        if left == 0:
            break
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids[:1] == first:  # a chat template has written it
            ids = ids[1:]
        if any(each >= vocab_size for each in ids):
            raise UsageError(
                "the tokenizer gives tokens that the model does not have",
                where=str(path),
                expected=f"ids below {vocab_size:,}",
                got=str(max(ids)),
                hint="put the model's own tokenizer.json beside its weights",
            )
        for begin in range(0, len(ids), size):
            window = ids[begin : begin + min(size, left)]
            if window:
                found.append([*first, *window])
            left -= len(window)
    if sum(map(len, found)) < min(_LEAST, count):
        raise UsageError(
            "the calibration text has too few tokens",
            expected=f"at least {_LEAST}",
            got=str(sum(map(len, found))),
            hint="give a text of some thousand words, in the language that the model is for",
        )
    return found


def text_hash(texts: Sequence[str]) -> str:
    """SHA-256 of the texts."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
