"""The engine's tokenizer as grammars see it: bytes of every token, and the tokens of given text."""

import ctypes
import functools
import json
import weakref
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from ingot.companions import TOKENIZER_FILE
from ingot.errors import RequestError
from ingot.runtime.control_tokens import is_control
from ingot.runtime.guided.library import TOKENIZE, Library

_BARRIER = "\x02"  # a byte that no merge joins to the text behind it
_CACHED_TEXTS = 16384
_MOST_BYTES = 1024  # that are cut into tokens at once: of a longer text the library needs the first token alone
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized")

LIMITS = {
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "verbose_errors": 0,
}
"""The states of a grammar take 1 to 2 kB each. The limits of a step end a grammar whose mask would take about 5 ms."""


class GrammarTokenizer:
    """Kept by every grammar that was made with it. Thread-safe.

    tokens  text → id of the control tokens: grammars name them, and they never are text
    init    what the library makes grammars with
    """

    def __init__(self, library: Library, directory: Path, end_ids: Iterable[int]) -> None:
        """Raises RequestError where the engine has no tokenizer.json, or one that cannot be used so."""
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise RequestError("grammars need the engine's tokenizer, and it has none", where=str(path))
        ends = sorted(end_ids)
        if not ends:
            raise RequestError(
                "grammars need a token that ends a sequence, and the engine has none",
                hint="give the model an eos_token_id in generation_config.json, and convert it again",
            )
        content = json.loads(path.read_bytes())
        added = tokenizers.Tokenizer.from_str(json.dumps(content)).get_added_tokens_decoder()
        self.tokens = {token.content: number for number, token in added.items() if is_control(token)}
        self._plain = _without_controls(content, self.tokens)
        entries = [{**each, "special": each["content"] in self.tokens} for each in content.get("added_tokens") or ()]
        document = json.dumps({**content, "added_tokens": entries}).encode()
        self._ids = functools.lru_cache(_CACHED_TEXTS)(self._encode)
        self._callback = TOKENIZE(self._tokenize)  # kept alive: the library calls it
        handle = library.new_tokenizer(document, ends, self._callback)
        weakref.finalize(self, library.call, "llg_free_tokenizer", handle).atexit = False
        self.init = library.new_init(handle, LIMITS)

    def _tokenize(self, user: Any, data: Any, size: int, output: Any, room: int) -> int:
        """See TOKENIZE. What is raised here cannot be passed on: no tokens then, and the library helps itself."""
        try:
            ids = self._ids(ctypes.string_at(data, min(size, _MOST_BYTES)))
        except Exception:
            return 0
        for place, token in enumerate(ids[:room]):
            output[place] = token
        return len(ids)

    def _encode(self, data: bytes) -> tuple[int, ...]:
        """As the model's texts are cut, in the middle of a text: no token begins it, nor a space of its own."""
        before, whole = (
            self._plain.encode(text, add_special_tokens=False).ids
            for text in (_BARRIER, _BARRIER + data.decode(errors="replace"))
        )
        if whole[: len(before)] == before:
            return tuple(whole[len(before) :])
        return tuple(self._plain.encode(data.decode(errors="replace"), add_special_tokens=False).ids)


def _without_controls(content: dict[str, Any], controls: Container[str]) -> tokenizers.Tokenizer:
    """The tokenizer to which all text is text."""
    plain = tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "post_processor": None}))
    added = (each for each in content.get("added_tokens") or () if each["content"] not in controls)
    kept = [each for each in added if plain.token_to_id(each["content"]) == each["id"]]
    plain.add_tokens([tokenizers.AddedToken(**{name: each[name] for name in _FLAGS if name in each}) for each in kept])
    plain.no_truncation()
    plain.no_padding()
    return plain
