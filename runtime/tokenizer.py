"""Text → token ids and back, with the tokenizer files of an engine directory.

`Detokenizer` turns tokens into text one by one. A piece of text is given out when it can no longer change:

    tokens   ... │ "▁caf" │ 0xC3 │ 0xA9 │ "▁au"      prompt and generated tokens
    text         │ " caf" │  -   │  é   │ " au"      half a character waits for the rest of it
             start        end ── pending ──▶
"""

import codecs
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers

from ingot.companions import TOKENIZER_FILE, read_tokenizer, read_tokenizer_settings
from ingot.errors import ConfigError, IngotError, RequestError
from ingot.runtime.control_tokens import ControlTokens, is_control
from ingot.runtime.special_tokens import read_special_tokens
from ingot.runtime.template_text import TemplateText

_HALF = "\ufffd"  # what the decoder puts where bytes are no character (yet)
_REPAIR = "convert the model again, with a tokenizer.json that works elsewhere"
_MANY = 1000  # tokens
_LONGEST = 8  # tokens: those of one character, 4 bytes at most, and special ones between them
_PATIENCE = 16  # pending tokens after which bytes that are still no character will not become one


def _byte_symbols() -> dict[str, int]:
    """Symbol → byte of byte-level tokenizers: printable Latin-1 stands for itself, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_symbols()


class Tokenizer:
    """tokenizer.json of a directory, and what tokenizer_config.json says about BOS."""

    def __init__(self, hf: tokenizers.Tokenizer, *, bos_id: int | None, add_bos: bool | None) -> None:
        self._hf, self._bos_id, self._add_bos = hf, bos_id, add_bos
        self._anchor = self._some_token()
        self._token_texts: dict[int, str] = {}
        self._controls: ControlTokens | None = None  # made for the first conversation
        # the library itself skips no special token that is marked as normalised, as those of Llama 2 are
        added = hf.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_tokens = {token.content: i for i, token in added.items() if is_control(token)}

    @classmethod
    def from_dir(cls, directory: Path | str) -> "Tokenizer":
        """Raises ConfigError if the directory has no usable tokenizer."""
        path = Path(directory) / TOKENIZER_FILE
        if not path.is_file():
            raise ConfigError(
                "the engine has no tokenizer",
                where=str(path),
                expected="tokenizer.json",
                hint="use ModelRunner with token ids, or convert a model that has a tokenizer.json",
            )
        hf = read_tokenizer(path)
        hf.no_truncation()
        hf.no_padding()
        bos = read_special_tokens(path.parent).get("bos_token")
        add_bos = read_tokenizer_settings(path.parent).raw("add_bos_token")
        return cls(
            hf,
            bos_id=None if bos is None else hf.token_to_id(bos),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._hf.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with what the tokenizer's post-processor adds. In TemplateText only what the template
        wrote becomes a control token.

        tokenizer_config's add_bos_token, where present, has the last word on a BOS at the front.
        """
        if not isinstance(text, str):
            raise RequestError("a prompt must be text", got=type(text).__name__)
        ids = self._ids(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._bos_id is not None:
            if self._add_bos and ids[:1] != [self._bos_id]:
                return [self._bos_id, *ids]
            if self._add_bos is False and ids[:1] == [self._bos_id]:
                plain = self._ids(text, add_special_tokens=False)
                return ids if ids == plain else ids[1:]
        return ids

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A batch of one, see `encode_one`, without the places."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not Unicode: half of a surrogate pair is not a character",
                got=f"U+{ord(text[error.start]):04X} at place {error.start}",
                hint="give whole characters; bytes that were not UTF-8 become such halves",
            ) from error
        with _library(lambda got: RequestError("the text cannot be tokenized", got=got)):
            if isinstance(text, TemplateText):
                self._controls = self._controls or ControlTokens(self._hf)
                return self._controls.encode(text, add_special_tokens=add_special_tokens)
            (encoding,) = self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _some_token(self) -> int:
        """A token to stand before another one: the last of "a", where the vocabulary can spell it."""
        try:
            return next(reversed(self._ids("a", add_special_tokens=False)), 0)
        except RequestError:
            return 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, all at once. Many are a batch of one, as in `_ids`; few are not worth that."""
        if skip_special_tokens:
            ids = [token for token in ids if token not in self.special_ids]
        with _library(lambda got: RequestError("the tokens cannot be turned into text", got=got, hint=_REPAIR)):
            if len(ids) < _MANY:
                return str(self._hf.decode(list(ids), skip_special_tokens=False))
            return str(self._hf.decode_batch([list(ids)], skip_special_tokens=False)[0])

    def token_text(self, token: int) -> str:
        """What one token adds to a text that it does not begin; half a character is shown as such."""
        text = self._token_texts.get(token)
        if text is None:
            before = self.decode([self._anchor], skip_special_tokens=False)
            text = self.decode([self._anchor, token], skip_special_tokens=False).removeprefix(before)
            self._token_texts[token] = text
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of `token_text`; of half a character its own bytes."""
        text, piece = self.token_text(token), self._hf.id_to_token(token)
        if _HALF not in text or piece is None:
            return text.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        if all(symbol in _BYTES for symbol in piece):
            return bytes(_BYTES[symbol] for symbol in piece)
        return text.encode()

    @property
    def halves_apart(self) -> bool:
        """Whether each byte that is not a character is decoded for itself, and not one for all parts of a character."""
        return self._hf.token_to_id("<0x00>") is not None

    def forms(self, word: str) -> list[tuple[int, ...]]:
        """Token sequences of a word at the beginning of a text and after a space."""
        found = (self._ids(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}"))
        return list(dict.fromkeys(tuple(ids) for ids in found if ids))

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> "Detokenizer":
        """For the tokens that follow `prompt`."""
        return Detokenizer(self, prompt, skip_special_tokens=skip_special_tokens)


class Detokenizer:
    """All pieces joined are the text that the generated tokens add to the prompt's.

    The prompt gives the context: a sentencepiece decoder drops the space of the very first word only.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window = list(prompt)  # from `start` in the drawing above
        self._end = len(self._window)
        text = self._text(self._end)
        self._whole = not text.endswith(_HALF)  # whether a character ends where the known text ends
        self._known = text[: len(text) - self._waiting(prompt, text)]

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain now, often of earlier tokens, or ""."""
        pieces = []
        for token in ids:
            self._window.append(int(token))
            pieces.append(self._settle(force=len(self._window) - self._end >= _PATIENCE))
        return "".join(pieces)

    def mark(self, token: int) -> str:
        """Take a token whose own text is not wanted. Returns the rest of the text before it, as `finish` does."""
        text = self.finish()
        self._window.append(token)
        self._advance()
        return text

    def finish(self) -> str:
        """The rest, without a last character of which only a part was generated."""
        text = self._text(len(self._window)).rstrip(_HALF)
        piece = text[len(self._known) :]
        self._advance()
        return piece

    def _waiting(self, prompt: Sequence[int], text: str) -> int:
        """Characters at the end of the prompt's text that another byte may change; others were no character for good.
        Where bytes are decoded apart, the first half of one undoes all whole ones that stand right before it."""
        decoder, tokenizer = codecs.getincrementaldecoder("utf-8")("replace"), self._tokenizer
        for token in prompt[-_LONGEST:]:
            if not (self._skip and token in tokenizer.special_ids):
                decoder.decode(tokenizer.token_bytes(int(token)))
        if not decoder.getstate()[0]:
            return 0
        return len(text) - len(text.rstrip(_HALF)) if tokenizer.halves_apart else 1

    def _settle(self, *, force: bool) -> str:
        text = self._text(len(self._window))
        if len(text) <= len(self._known) or (text.endswith(_HALF) and not force):
            return ""
        piece = text[len(self._known) :]
        self._advance()
        return piece

    def _advance(self) -> None:
        """What was pending is settled, and becomes the context of what follows; a context begins with a character."""
        if self._whole:
            del self._window[: self._end]
        self._end = len(self._window)
        self._known = self._text(self._end)
        self._whole = not self._known.endswith(_HALF)

    def _text(self, count: int) -> str:
        return self._tokenizer.decode(self._window[:count], skip_special_tokens=self._skip)


@contextlib.contextmanager
def _library(refused: Callable[[str], IngotError]) -> Iterator[None]:
    """What the library raises becomes `refused`: it raises nothing specific, and where it panics no Exception even."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, IngotError):
        raise
    except BaseException as error:
        raise refused(str(error)) from error
