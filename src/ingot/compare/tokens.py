"""The tokens that an engine is compared on: of a text where it has a tokenizer, else drawn from a seed."""

import dataclasses
from pathlib import Path

import numpy as np

from ingot.errors import UsageError
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import Int32

SAMPLE = Path(__file__).parent / "sample.txt"
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """sequences: int32 [count, length]; origin: where they come from, in words."""

    sequences: Int32
    origin: str
    is_text: bool


def read_tokens(engine: Path, vocab_size: int, wanted: int, text: Path | None, longest: int) -> Tokens:
    """At most `wanted` tokens in sequences of at most `longest`; what does not fill a sequence is left out."""
    if text is None and not (engine / "tokenizer.json").is_file():
        drawn = np.random.default_rng(SEED).integers(0, vocab_size, wanted).astype(np.int32)
        return Tokens(sequences=_cut(drawn, longest), origin=f"token ids from seed {SEED}", is_text=False)
    ids = np.array(Tokenizer.from_dir(engine).encode(_read(text or SAMPLE)), np.int32)[:wanted]
    if len(ids) < 2:
        raise UsageError(
            "the text to compare on is too short",
            where=str(text),
            expected="at least two tokens",
            got=f"{len(ids)}",
            hint="give another --text",
        )
    if ids.max() >= vocab_size:
        raise UsageError(
            "the tokenizer knows tokens that the model does not",
            where=str(engine),
            expected=f"ids below {vocab_size}",
            got=str(ids.max()),
            hint="put the model's own tokenizer.json beside its weights, then convert and build again",
        )
    return Tokens(sequences=_cut(ids, longest), origin="the sample text" if text is None else text.name, is_text=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("the text is not UTF-8", where=str(path), got=str(error)) from error


def _cut(ids: Int32, longest: int) -> Int32:
    length = min(longest, len(ids))
    count = len(ids) // length
    return ids[: count * length].reshape(count, length)
