"""The files beside a model's weights that texts need: tokenizer and generation settings.

What no runner could use is refused where a model is converted and where an engine is built, by the functions with which
runners read these files.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from ingot.configs.generation import read_generation_defaults
from ingot.configs.read import Section
from ingot.configs.token_ids import TokenIds, check_vocabulary, read_token_ids
from ingot.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_COPIES = 16  # times the bytes of tokenizer.json: what the library makes of it

_PANIC = "PanicException"  # of Rust: no Exception for Python, and of a module that cannot be imported
_SAMPLE = "a b"
_HINT = "take the model's own tokenizer.json again, or leave the file out and run with token ids"


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises ConfigError for a file from which no usable tokenizer can be made."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the tokenizer cannot be read", where=str(path), got=str(error), hint=_HINT) from error
    return parse_tokenizer(text, str(path))


def parse_tokenizer(text: str, where: str) -> Tokenizer:
    """tokenizer.json as a tokenizer. One that panics at a text is none; a vocabulary that cannot spell the text may."""
    with _words(where):
        tokenizer = Tokenizer.from_str(text)
        with contextlib.suppress(Exception):
            tokenizer.decode(tokenizer.encode(_SAMPLE).ids)
        return tokenizer


def read_tokenizer_settings(directory: Path) -> Section:
    """tokenizer_config.json; an absent file is an empty object. Raises ConfigError."""
    path = directory / "tokenizer_config.json"
    return Section.from_file(path) if path.is_file() else Section({}, str(path))


def tokenizer_memory(directory: Path) -> int:
    """Bytes that `check_companions` needs."""
    path = directory / TOKENIZER_FILE
    return TOKENIZER_COPIES * path.stat().st_size if path.is_file() else 0


def check_companions(directory: Path) -> None:
    """Raise ConfigError for a tokenizer or settings that no runner could use."""
    if (path := directory / TOKENIZER_FILE).is_file():
        read_tokenizer(path)
    read_tokenizer_settings(directory)
    read_generation_defaults(directory)


def check_token_ids(directory: Path, vocab_size: int) -> TokenIds:
    """Those of generation_config.json. Raises ConfigError for tokens that the model does not have."""
    ids = read_token_ids(directory)
    check_vocabulary(ids, vocab_size, str(directory / "generation_config.json"))
    return ids


@contextlib.contextmanager
def _words(where: str) -> Iterator[None]:
    """The library raises nothing narrower than Exception, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise ConfigError("the tokenizer cannot be read", where=where, got=str(error)[:300], hint=_HINT) from error
