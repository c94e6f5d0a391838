"""What an engine's requests need to keep to grammars: made for the first of them, and shared by all."""

import functools
import importlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path

from ingot.configs.structured_outputs import StructuredOutputs
from ingot.errors import RequestError
from ingot.runtime.guided.grammars import make_grammar
from ingot.runtime.guided.library import load_library
from ingot.runtime.guided.matcher import GrammarCache, Matcher
from ingot.runtime.guided.refused_schema import find_refused

_TOKENIZER = "ingot.runtime.guided.grammar_tokenizer"


class Guides:
    """Thread-safe. Compiling a grammar takes a millisecond to a second: not on the thread that computes steps."""

    def __init__(self, directory: Path, end_ids: Iterable[int]) -> None:
        self._directory, self._end_ids = directory, frozenset(end_ids)
        self._lock = threading.Lock()
        self._made: GrammarCache | None = None

    @property
    def cache(self) -> GrammarCache:
        """Raises RequestError where grammars cannot be had."""
        with self._lock:
            if self._made is None:
                library = load_library()
                tokens = importlib.import_module(_TOKENIZER)  # not before: ModelRunner needs no tokenizers
                tokenizer = tokens.GrammarTokenizer(library, self._directory, self._end_ids)
                self._made = GrammarCache(library, tokenizer)
            return self._made

    def matcher(self, asked: StructuredOutputs) -> Matcher:
        """The matcher of one sequence. Raises RequestError for what cannot be enforced, in the library's words."""
        return self.compile(*make_grammar(asked, self.wire))

    def compile(self, kind: str, text: str) -> Matcher:
        """See `matcher`."""
        cache = self.cache
        try:
            return cache.new(kind, text)
        except RequestError as error:
            if kind != "json_schema" or error.got is None:
                raise
            problem = functools.partial(cache.problem, kind)
            path = find_refused(json.loads(text), problem)
            raise RequestError(error.what, where=f"schema {path}", got=error.got, hint=error.hint) from None

    def wire(self, text: str) -> str:
        """A text as Lark spells it: what reads like a control token is that token."""
        return spell(text, self.cache.tokenizer.tokens)


def spell(text: str, tokens: dict[str, int]) -> str:
    """See Guides.wire. If several tokens begin at a place, the longest counts."""
    parts: list[str] = []
    begin = place = 0
    while place < len(text):
        found = max((each for each in tokens if each and text.startswith(each, place)), key=len, default=None)
        if found is None:
            place += 1
            continue
        if begin < place:
            parts.append(json.dumps(text[begin:place], ensure_ascii=False))
        parts.append(f"<[{tokens[found]}]>")
        begin = place = place + len(found)
    if begin < len(text):
        parts.append(json.dumps(text[begin:], ensure_ascii=False))
    return " ".join(parts)
